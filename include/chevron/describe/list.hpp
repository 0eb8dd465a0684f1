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

inline constexpr int listed_families = 3;  // forwards; B or I; W

/// Who acts next: for each rank the time at which it may try again, the earliest found in O(1), changed in O(log ranks).
class earliest_rank {
 public:
  static constexpr double asleep = -1;  // until something it needs is scheduled

  constexpr explicit earliest_rank(int ranks) : time_(ranks, zeroed), leaves_(1) {
    while (leaves_ < ranks) leaves_ *= 2;
    best_ = buffer<int>(2 * leaves_);
    for (int i = 0; i < leaves_; ++i) best_.data[leaves_ + i] = i < ranks ? i : -1;
    for (int i = leaves_ - 1; i > 0; --i) choose(i);
  }

  constexpr int rank() const { return best_.data[1]; }
  constexpr double at(int rank) const { return time_.data[rank]; }
  constexpr void set(int rank, double time) {
    time_.data[rank] = time;
    best_.data[leaves_ + rank] = time < 0 ? -1 : rank;
    for (int i = (leaves_ + rank) / 2; i > 0; i /= 2) choose(i);
  }

 private:
  constexpr void choose(int i) {
    int const left = best_.data[2 * i], right = best_.data[2 * i + 1];
    best_.data[i] = right < 0 || (left >= 0 && time_.data[left] <= time_.data[right]) ? left : right;
  }

  buffer<double> time_;
  int leaves_;
  buffer<int> best_;  // a tree: of each pair the rank that is earlier, the lower one of equals; -1: both asleep
};

/// What has happened so far in a list schedule, and what a rank could do next.
struct listed_state {
  int stages;
  int micro_batches;
  double* forward_end;  // by cell; negative: not scheduled
  double* input_end;    // of B or I
  int* next;            // by stage and family: the microbatch that comes next

  static constexpr double never = -1;

  /// When the next action of this family on this stage could start; `never` if what it needs is not scheduled yet.
  constexpr double ready_at(int family, int stage, std::int16_t const* rank_of, double communication) const {
    int const m = next[stage * listed_families + family];
    if (m >= micro_batches) return never;
    int const cell = stage * micro_batches + m;
    if (family == 2) return input_end[cell];
    int const from = family == 0 ? stage - 1 : stage + 1;
    double ready = 0;
    if (from >= 0 && from < stages) {
      double const made = family == 0 ? forward_end[cell - micro_batches] : input_end[cell + micro_batches];
      if (made < 0) return never;
      ready = made + (rank_of[from] != rank_of[stage] ? communication : 0);
    }
    if (family == 1) {
      if (forward_end[cell] < 0) return never;
      ready = forward_end[cell] > ready ? forward_end[cell] : ready;
    }
    return ready;
  }
};

}  // namespace detail

/// Plays a list schedule. One that gets stuck on its own limit comes back with `problem` set.
template <class Placement, class Limits>
constexpr plan expand(listing<Placement, Limits> const& what, shape size) {
  plan result;
  if (finding const f = detail::begin_plan_of(what, size, result)) return detail::refused(size, what.name, f);
  std::int16_t const* const rank_of = result.rank_of.data;
  int const stages = result.stages;
  int const ranks = size.ranks;
  int const micro_batches = size.micro_batches;
  int const cells = stages * micro_batches;
  bool const split = what.work == work_graph::split_backward;
  int const limit = result.in_flight_limit;
  std::int64_t const byte_limit = result.byte_limit;
  std::int64_t const* const bytes = byte_limit > 0 ? result.stage_bytes.data : nullptr;

  // Each rank's stages, from the input side; what the later ones of its rank will need while a stage's forward is in flight.
  detail::stages_by_rank const placed(ranks, stages, rank_of);
  int const* const first = placed.first.data;
  int const* const stage_of = placed.stage.data;
  buffer<int> later(stages, zeroed);
  buffer<std::int64_t> later_bytes(stages, zeroed), bytes_now(ranks, zeroed);
  for (int r = 0; r < ranks; ++r) {
    for (int i = first[r + 1] - 2; i >= first[r]; --i) {
      later.data[stage_of[i]] = first[r + 1] - 1 - i;
      if (bytes != nullptr) later_bytes.data[stage_of[i]] = later_bytes.data[stage_of[i + 1]] + bytes[stage_of[i + 1]];
    }
  }

  // Families of kinds in the order of preference.
  int const families_here = split ? 3 : 2;
  kind const kinds[detail::listed_families] = {kind::forward, split ? kind::backward_input : kind::backward, kind::backward_weight};
  int order_of_families[detail::listed_families] = {0, 1, 2};
  for (int i = 1; i < families_here; ++i) {
    for (int j = i; j > 0; --j) {
      int& before = order_of_families[j - 1];
      int& after = order_of_families[j];
      if (what.rank_of_kind[static_cast<int>(kinds[before])] <= what.rank_of_kind[static_cast<int>(kinds[after])]) break;
      int const swapped = before;
      before = after;
      after = swapped;
    }
  }
  double const length[detail::listed_families] = {
      what.times.forward, split ? what.times.backward_input : what.times.backward_input + what.times.backward_weight,
      what.times.backward_weight};
  double const communication = what.times.communication;

  buffer<double> forward_end(cells), input_end(cells), free_at(ranks, zeroed);
  buffer<int> next(detail::listed_families * stages, zeroed), in_flight(ranks, zeroed), count(ranks, zeroed);
  for (int i = 0; i < cells; ++i) forward_end.data[i] = input_end.data[i] = detail::listed_state::never;
  int const most = families_here * cells;
  // A rank's actions in the order of time: it has so many for each of its stages.
  result.actions = buffer<action>(most);
  result.begin = buffer<int>(ranks + 1);
  for (int r = 0; r <= ranks; ++r) result.begin.data[r] = first[r] * families_here * micro_batches;
  detail::listed_state const state{stages, micro_batches, forward_end.data, input_end.data, next.data};
  detail::earliest_rank tries(ranks);

  for (int filled = 0; filled < most;) {
    // Ranks act in the order of time, so what is ready by then is known.
    int const rank = tries.rank();
    if (rank < 0) {
      finding f;
      f.broken = law::description;
      for (int r = ranks - 1; r >= 0; --r)
        f.rank = count.data[r] < result.begin.data[r + 1] - result.begin.data[r] ? r : f.rank;
      f.words = limit > 0 ? "list scheduling is stuck: allow more than the limit in flight, which is "
                          : "list scheduling is stuck: allow more than the limit of bytes in flight, which is ";
      f.number = limit > 0 ? limit : byte_limit;
      return detail::refused(size, what.name, f);
    }
    double const now = tries.at(rank);
    int family = -1;
    int stage = -1;
    double soonest = detail::earliest_rank::asleep;  // of what is known to become ready later
    for (int preferred = 0; preferred < families_here && stage < 0; ++preferred) {
      family = order_of_families[preferred];
      for (int i = first[rank]; i < first[rank + 1]; ++i) {
        int const candidate = stage_of[family == 0 ? first[rank] + first[rank + 1] - 1 - i : i];
        if (family == 0) {
          if (limit > 0 && in_flight.data[rank] + later.data[candidate] >= limit) continue;
          if (bytes != nullptr && bytes_now.data[rank] + bytes[candidate] + later_bytes.data[candidate] > byte_limit) continue;
        }
        double const ready = state.ready_at(family, candidate, rank_of, communication);
        if (ready < 0) continue;
        if (ready <= now) {
          stage = candidate;
          break;
        }
        if (soonest < 0 || ready < soonest) soonest = ready;
      }
    }
    if (stage < 0) {
      tries.set(rank, soonest);
      continue;
    }

    kind const what_now = kinds[family];
    int const m = next.data[stage * detail::listed_families + family]++;
    double const end = now + length[family];
    int const cell = stage * micro_batches + m;
    if (family == 0)
      forward_end.data[cell] = end;
    else if (family == 1)
      input_end.data[cell] = end;
    int const change = family == 0 ? 1 : family == 2 || !split ? -1 : 0;
    in_flight.data[rank] += change;
    if (bytes != nullptr) bytes_now.data[rank] += change * bytes[stage];
    result.actions.data[result.begin.data[rank] + count.data[rank]++] = make_action(what_now, stage, m);
    ++filled;
    free_at.data[rank] = end;
    bool const done = count.data[rank] == result.begin.data[rank + 1] - result.begin.data[rank];
    tries.set(rank, done ? detail::earliest_rank::asleep : end);
    // Whoever needs this may try again when it arrives. A rank that is computing is not disturbed: its next try is at its end.
    int const to = family == 0 ? stage + 1 : family == 1 ? stage - 1 : -1;
    if (to < 0 || to >= stages || rank_of[to] == rank) continue;
    int const consumer = rank_of[to];
    double const arrives = end + communication;
    double const wakes = arrives > free_at.data[consumer] ? arrives : free_at.data[consumer];
    double const planned = tries.at(consumer);
    if (planned < 0 || (wakes < planned && planned > free_at.data[consumer])) tries.set(consumer, wakes);
  }
  return result;
}

}  // namespace chevron
