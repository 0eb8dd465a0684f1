#pragma once

#include <cstdint>

#include <chevron/describe/expression.hpp>
#include <chevron/describe/limits.hpp>
#include <chevron/describe/misuse.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/describe/token.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// List scheduling: say what there is to do, where, what goes first and how much may be in flight; the order follows from
/// playing it, each rank always taking the first ready action in its order of preference.

namespace chevron {

/// What a step consists of: forwards and whole backwards, or forwards, input and weight gradients.
enum class work_graph { full_backward, split_backward };

/// A schedule found by list scheduling. Make one with `schedule_of`.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto mine = chevron::schedule_of(chevron::work_graph::split_backward)
///     .place(chevron::placement::vee).prefer(I, F, W).at_most_in_flight(2 * ranks);
/// ```
///
/// Rules. Kinds that `prefer` does not name come last. Of one kind, forwards take the latest stage that is ready and gradients
/// the earliest: whatever frees memory soonest. Microbatches go in their order. A forward is admitted only if the limit leaves a
/// place for each later stage of its rank, so that a microbatch that entered can leave again. Times are those of
/// `assuming`, by default one unit for each of F, I and W of a chunk.
template <class Placement, class Limits = declared_limits<>>
struct listing {
  Placement where;
  work_graph work;
  int rank_of_kind[compute_kinds];  // smaller is preferred
  Limits limits;
  costs times;
  char const* name;

  template <placement_policy Where>
  constexpr listing<Where, Limits> place(Where new_place) const {
    return {new_place, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, limits, times, name};
  }
  /// The order in which a rank takes what is ready: `prefer(I, F, W)`.
  template <kind... Kinds>
  constexpr listing prefer(token<Kinds>...) const {
    static_assert((0 + ... + (1 << static_cast<int>(Kinds))) == (0 | ... | (1 << static_cast<int>(Kinds))),
                  "prefer names each kind once, what goes first to what goes last: prefer(I, F, W)");
    listing out = *this;
    for (int& place_in_order : out.rank_of_kind) place_in_order = compute_kinds;
    int place_in_order = 0;
    ((out.rank_of_kind[static_cast<int>(Kinds)] = place_in_order++), ...);
    return out;
  }
  template <class... Others>
  constexpr listing prefer(Others const&...) const {
    static_assert(misuse::right<Others...>, "prefer takes kinds, what goes first to what goes last: prefer(I, F, W)");
    return *this;
  }
  /// The most chunks in flight on any rank; also declared to the gate. At least as many as a rank has chunks.
  template <expression::operand Count>
  constexpr auto at_most_in_flight(Count most) const {
    return limited(limits.with_in_flight(expression::as_node(most)));
  }
  /// The most bytes in flight on any rank, where stages keep what `of` says for each microbatch in flight; also declared to the
  /// gate.
  template <declarable_sizes Sizes>
  constexpr auto at_most_bytes_in_flight(std::int64_t most, Sizes const& of) const {
    return limited(limits.with_bytes(most, of));
  }
  /// Declares the most messages a step may send, over all ranks. Scheduling does not change their number.
  template <expression::operand Count>
  constexpr auto at_most_messages(Count most) const {
    return limited(limits.with_messages(expression::as_node(most)));
  }
  /// What actions cost, for deciding what is ready first.
  constexpr listing assuming(costs const& c) const {
    listing out = *this;
    out.times = c;
    return out;
  }
  constexpr listing named(char const* as) const {
    listing out = *this;
    out.name = as;
    return out;
  }

  template <class NewLimits>
  constexpr listing<Placement, NewLimits> limited(NewLimits const& to) const {
    return {where, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, to, times, name};
  }
};

/// Starts the description of a list schedule: stages in a line, no limit, gradients before forwards before weights.
constexpr listing<placement::linear_t> schedule_of(work_graph work) {
  return {placement::linear, work, {1, 0, 0, 2}, {}, {}, ""};
}

template <class... Parts>
constexpr int stages_of(listing<Parts...> const& what, shape size) {
  return stages_in(what.where, size);
}
template <class... Parts>
constexpr int actions_at_most(listing<Parts...> const& what, shape size) {
  return (what.work == work_graph::split_backward ? 3 : 2) * stages_of(what, size) * size.micro_batches;
}

namespace detail {

inline constexpr double never = 1e300;

/// Whose turn it is. Ranks act in the order of the times of their next tries, of equal times the lower rank first. A tree of the
/// earliest times is walked from left to right through the ranks that are due now, and brought up to date on the way: about two
/// nodes a turn where all ranks act at once, and never more than twice the depth of the tree.
class turns {
 public:
  /// All ranks are due at time 0.
  constexpr explicit turns(int ranks) {
    while (leaves_ < ranks) leaves_ *= 2;
    earliest_ = buffer<double>(2 * leaves_);
    double* const earliest = earliest_.data;
    for (int i = 0; i < leaves_; ++i) earliest[leaves_ + i] = i < ranks ? 0 : never;
    for (int i = leaves_ - 1; i > 0; --i) earliest[i] = earliest[2 * i];
    descend(1);
  }

  constexpr double now() const { return now_; }  ///< `never`: nobody has anything to wait for
  constexpr int rank() const { return at_ - leaves_; }

  /// The rank whose turn it is tries again at `time`; whose turn comes next?
  constexpr void next_turn(double time) {
    double* const earliest = earliest_.data;
    int at = at_;
    earliest[at] = time;
    if (time <= now_ && !goes_back_) return;
    while (at > 1) {
      if (at % 2 == 0 && earliest[at + 1] <= now_ && !goes_back_) {
        descend(at + 1);
        return;
      }
      at /= 2;
      double const left = earliest[2 * at];
      double const right = earliest[2 * at + 1];
      earliest[at] = left <= right ? left : right;
    }
    now_ = earliest[1];
    goes_back_ = false;
    descend(1);
  }

  /// A rank that waits tries at `time`, unless it would try earlier anyway.
  constexpr void wake(int rank, double time) {
    double* const earliest = earliest_.data;
    for (int i = leaves_ + rank; i > 0 && time < earliest[i]; i /= 2) earliest[i] = time;
    if (time <= now_ && leaves_ + rank < at_) goes_back_ = true;
  }

 private:
  constexpr void descend(int node) {
    while (node < leaves_) node = 2 * node + (earliest_.data[2 * node] <= now_ ? 0 : 1);
    at_ = node;
  }

  int leaves_ = 1;
  int at_ = 1;
  double now_ = 0;
  bool goes_back_ = false;   // a rank to the left became due now: a cost of 0
  buffer<double> earliest_;  // node i: the earlier of 2i and 2i + 1; from `leaves_` on the ranks
};

/// What there is to do of one kind on one stage, microbatch after microbatch.
struct listed_work {
  action what{};  // of microbatch 0
  int taken = 0;  // how many microbatches have been,
  int known = 0;  // and for how many it is known when they can start
  int rank = 0;
  double length = 0;
  int change = 0;                 // of the chunks in flight on its rank,
  std::int64_t bytes_change = 0;  // and of their bytes
  std::int64_t bytes_room = 0;    // it is admitted where no more than that are in flight
  int fed = 0;                    // so many works need its results:
  int feeds[2]{};
};

/// The works of a step. Each rank's stand together, in the order in which it prefers them.
struct listed_works {
  int families;  // of kinds: forwards; B or I; W
  buffer<listed_work> work;
  buffer<double> ready;  // by work: when what comes next can start, as far as that is known
  buffer<int> room;      // by work: it is admitted where fewer chunks are in flight
  int entry = 0;         // the forwards of stage 0

  template <class Listing>
  constexpr listed_works(Listing const& what, plan const& into, stages_by_rank const& placed)
      : families(what.work == work_graph::split_backward ? 3 : 2),
        work(families * into.stages, zeroed),
        ready(families * into.stages),
        room(families * into.stages) {
    bool const split = families == 3;
    kind const kinds[3] = {kind::forward, split ? kind::backward_input : kind::backward, kind::backward_weight};
    double const length[3] = {what.times.forward,
                              split ? what.times.backward_input : what.times.backward_input + what.times.backward_weight,
                              what.times.backward_weight};
    int place_of[3] = {0, 0, 0};  // a family's among the others
    for (int family = 0; family < families; ++family) {
      int const preferred = what.rank_of_kind[static_cast<int>(kinds[family])];
      for (int other = 0; other < families; ++other) {
        int const to_it = what.rank_of_kind[static_cast<int>(kinds[other])];
        if (to_it < preferred || (to_it == preferred && other < family)) ++place_of[family];
      }
    }

    int const* const first = placed.first.data;
    buffer<int> index_memory(families * into.stages);
    int* const index = index_memory.data;  // by stage and family
    for (int r = 0; r < into.size.ranks; ++r) {
      int const held = placed.held(r);
      for (int i = 0; i < held; ++i) {
        for (int family = 0; family < families; ++family) {
          // Forwards from the latest stage to the earliest, gradients the other way.
          index[placed.stage.data[first[r] + i] * families + family] =
              first[r] * families + place_of[family] * held + (family == 0 ? held - 1 - i : i);
        }
      }
    }

    std::int64_t const* const bytes = into.byte_limit > 0 ? into.stage_bytes.data : nullptr;
    for (int r = 0; r < into.size.ranks; ++r) {
      // What the later stages of its rank will need while a stage's forward is in flight.
      int later = 0;
      std::int64_t later_bytes = 0;
      for (int i = first[r + 1] - 1; i >= first[r]; --i) {
        int const stage = placed.stage.data[i];
        std::int64_t const bytes_here = bytes != nullptr ? bytes[stage] : 0;
        for (int family = 0; family < families; ++family) {
          int const at = index[stage * families + family];
          bool const forward = family == 0;
          listed_work& w = work.data[at];
          w.what = make_action(kinds[family], stage, 0);
          w.rank = r;
          w.length = length[family];
          w.change = forward ? 1 : family == families - 1 ? -1 : 0;
          w.bytes_change = w.change * bytes_here;
          w.bytes_room = forward ? into.byte_limit - bytes_here - later_bytes : most_bytes;
          room.data[at] = forward && into.in_flight_limit > 0 ? into.in_flight_limit - later : most_chunks;
          ready.data[at] = never;
          if (forward) w.feeds[w.fed++] = stage + 1 < into.stages ? index[(stage + 1) * families] : index[stage * families + 1];
          if (family == 1 && stage > 0) w.feeds[w.fed++] = index[(stage - 1) * families + 1];
          if (family == 1 && split) w.feeds[w.fed++] = index[stage * families + 2];
        }
        ++later;
        later_bytes += bytes_here;
      }
    }
    entry = index[0];
  }

 private:
  static constexpr int most_chunks = 2147483647;
  static constexpr std::int64_t most_bytes = 9223372036854775807;
};

/// How far a rank has come.
struct listed_progress {
  int at;  // where its next action goes
  int in_flight;
  std::int64_t bytes;
  bool waits;  // for something from another rank
};

}  // namespace detail

/// Plays a list schedule. One that gets stuck on its own limit comes back with `problem` set.
template <class Placement, class Limits>
constexpr plan expand(listing<Placement, Limits> const& what, shape size) {
  plan result;
  if (finding const f = detail::begin_plan_of(what, size, result)) return detail::refused(size, what.name, f);
  int const ranks = size.ranks;
  int const micro_batches = size.micro_batches;
  detail::stages_by_rank const placed(ranks, result.stages, result.rank_of.data);
  detail::listed_works works(what, result, placed);
  int const families = works.families;
  detail::listed_work* const work = works.work.data;
  double* const ready_of = works.ready.data;
  int const* const room_of = works.room.data;
  double const communication = what.times.communication;
  bool const counts_bytes = result.byte_limit > 0;

  // When each can start, by work and microbatch: whatever stage 0 needs is there.
  int const most = families * result.stages * micro_batches;
  buffer<double> starts_memory(most);
  double* const starts = starts_memory.data;
  for (int m = 0; m < micro_batches; ++m) starts[works.entry * micro_batches + m] = 0;
  ready_of[works.entry] = 0;
  work[works.entry].known = micro_batches;

  // A rank's actions in the order of time: it has so many for each of its stages.
  result.actions = buffer<action>(most);
  result.begin = buffer<int>(ranks + 1);
  action* const actions = result.actions.data;
  int* const begin = result.begin.data;
  buffer<int> first_memory(ranks + 1);
  int* const first = first_memory.data;  // of each rank's works
  for (int r = 0; r <= ranks; ++r) {
    first[r] = placed.first.data[r] * families;
    begin[r] = first[r] * micro_batches;
  }
  buffer<detail::listed_progress> progress_memory(ranks);
  detail::listed_progress* const progress = progress_memory.data;
  for (int r = 0; r < ranks; ++r) progress[r] = {begin[r], 0, 0, false};

  detail::turns turn(ranks);
  for (int filled = 0; filled < most;) {
    // Ranks act in the order of time, so what is ready by then is known.
    double const now = turn.now();
    if (now == detail::never) {
      finding f;
      f.broken = law::description;
      for (int r = ranks - 1; r >= 0; --r) f.rank = progress[r].at < begin[r + 1] ? r : f.rank;
      bool const chunks = result.in_flight_limit > 0;
      f.words = chunks ? "list scheduling is stuck: allow more than the limit in flight, which is "
                       : "list scheduling is stuck: allow more than the limit of bytes in flight, which is ";
      f.number = chunks ? result.in_flight_limit : result.byte_limit;
      return detail::refused(size, what.name, f);
    }
    int const rank = turn.rank();
    detail::listed_progress const come = progress[rank];
    int const stop = first[rank + 1];
    int taken = first[rank];
    double soonest = detail::never;  // of what is known to become ready later
    for (; taken < stop; ++taken) {
      double const ready = ready_of[taken];
      if (ready >= soonest || come.in_flight >= room_of[taken]) continue;
      if (counts_bytes && come.bytes > work[taken].bytes_room) continue;
      if (ready <= now) break;
      soonest = ready;
    }
    if (taken == stop) {
      progress[rank].waits = true;
      turn.next_turn(soonest);
      continue;
    }

    // Fields are read where they stand: to copy what was partly written just now would wait for it.
    detail::listed_work& one = work[taken];
    int const m = one.taken;
    int const after = m + 1;
    one.taken = after;
    double const end = now + one.length;
    action next = one.what;
    next.micro_batch = static_cast<std::uint32_t>(m) & 0xffffu;
    actions[come.at] = next;
    ++filled;
    progress[rank] = {come.at + 1, come.in_flight + one.change, come.bytes + one.bytes_change, false};
    ready_of[taken] = after < one.known ? starts[taken * micro_batches + after] : detail::never;
    for (int i = 0; i < one.fed; ++i) {
      int const to = one.feeds[i];
      detail::listed_work& other = work[to];
      double const arrives = other.rank == rank ? end : end + communication;
      starts[to * micro_batches + m] = arrives;
      other.known = after;
      if (other.taken != m) continue;
      ready_of[to] = arrives;
      // A rank that is computing is not disturbed: its next try is at its end.
      if (progress[other.rank].waits) turn.wake(other.rank, arrives);
    }
    turn.next_turn(end);
  }
  return result;
}

}  // namespace chevron
