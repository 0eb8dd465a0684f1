#pragma once

#include <cstdint>

#include <chevron/describe/expression.hpp>
#include <chevron/describe/limits.hpp>
#include <chevron/describe/list_works.hpp>
#include <chevron/describe/misuse.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/describe/token.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// List scheduling: computes an order of actions from work, placement, preferences and limits. Plays a step in which each rank
/// always runs its most preferred ready action.

namespace chevron {

/// A schedule that list scheduling computes. Created by `schedule_of`.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto mine = chevron::schedule_of(chevron::work_graph::split_backward)
///     .place(chevron::placement::vee).prefer(I, F, W).at_most_in_flight(2 * ranks);
/// ```
///
/// Rules. Kinds that `prefer` does not name come last. Among ready forwards a rank runs that of its latest stage, among ready
/// gradients that of its earliest stage, since these free memory soonest. Each stage runs microbatches in ascending order. A
/// forward runs only if the limit leaves room for a chunk of each later stage of its rank, so that every microbatch in the
/// pipeline can finish. Times are the costs passed to `assuming`, by default one unit for each of F, I and W of a chunk.
template <class Placement, class Limits = declared_limits<>>
struct listing : declares_limits<listing<Placement, Limits>> {
  Placement where;
  work_graph work;
  int rank_of_kind[compute_kinds];  // by kind; a smaller number is preferred
  Limits limits;
  costs times;
  char const* name;

  /// The same description with the placement `new_place`.
  template <placement_policy Where>
  constexpr listing<Where, Limits> place(Where new_place) const {
    return {{}, new_place, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, limits, times, name};
  }
  /// The same description with tokens in order of preference, as in `prefer(I, F, W)`: a rank runs the ready action whose token
  /// is first in this order.
  template <kind... Kinds>
  constexpr listing prefer(token<Kinds>...) const {
    static_assert((0 + ... + (1 << static_cast<int>(Kinds))) == (0 | ... | (1 << static_cast<int>(Kinds))),
                  "prefer names each kind once, from the first to the last: prefer(I, F, W)");
    listing out = *this;
    for (int& place_in_order : out.rank_of_kind) place_in_order = compute_kinds;
    int place_in_order = 0;
    ((out.rank_of_kind[static_cast<int>(Kinds)] = place_in_order++), ...);
    return out;
  }
  /// Refuses `Others`, arguments that are not tokens: does not compile, and the error says what `prefer` accepts.
  /// \returns nothing, since it never compiles
  template <class... Others>
  constexpr listing prefer(Others const&...) const {
    static_assert(misuse::right<Others...>, "prefer takes kinds, from the first to the last: prefer(I, F, W)");
    return *this;
  }
  /// The same description with these costs, which decide when an action is ready.
  constexpr listing assuming(costs const& c) const {
    listing out = *this;
    out.times = c;
    return out;
  }
  /// The same description with the name `as`.
  constexpr listing named(char const* as) const {
    listing out = *this;
    out.name = as;
    return out;
  }

  /// The same description with the limits `to`.
  template <class NewLimits>
  constexpr listing<Placement, NewLimits> limited(NewLimits const& to) const {
    return {{}, where, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, to, times, name};
  }
};

/// Starts the description of a list schedule: linear placement, no limit, and a preference for gradients, then forwards, then
/// weight gradients.
/// \param work whether backwards are whole, or split into I and W
/// \returns a description, whose members return changed copies
constexpr listing<placement::linear_t> schedule_of(work_graph work) {
  return {{}, placement::linear, work, {1, 0, 0, 2}, {}, {}, ""};
}

/// The number of actions of a list schedule at this size.
template <class... Parts>
constexpr int actions_at_most(listing<Parts...> const& what, shape size) {
  return (what.work == work_graph::split_backward ? 3 : 2) * stages_of(what, size) * size.units();
}

namespace detail {

/// Plays a step, with or without slices: two instances of one template, since each condition costs constant evaluation time.
template <bool Sliced, class Placement, class Limits>
constexpr plan play_list(listing<Placement, Limits> const& what, shape size) {
  plan result;
  if (finding const f = detail::begin_plan_of(what, size, result)) return detail::refused(size, what.name, f);
  int const ranks = size.ranks;
  int const micro_batches = size.units();
  int const slices = size.slices;
  detail::stages_by_rank const placed(ranks, result.stages, result.rank_of.data);
  detail::listed_works works(what, result, placed);
  int const families = works.families;
  detail::listed_work* const work = works.work.data;
  double* const ready_of = works.ready.data;
  int const* const room_of = works.room.data;
  double const communication = what.times.communication + what.times.latency;
  detail::sliced_room of_slices(result, placed);
  bool const counts_bytes = result.byte_limit > 0;

  // By work and microbatch: the earliest start of the action. Inputs of stage 0 arrive at time 0.
  int const most = families * result.stages * micro_batches;
  buffer<double> starts_memory(most);
  double* const starts = starts_memory.data;
  for (int m = 0; m < micro_batches; ++m) starts[works.entry * micro_batches + m] = 0;
  ready_of[works.entry] = 0;
  work[works.entry].known = micro_batches;

  // Each rank's actions in the order of time; `begin` follows from the rank's number of stages.
  result.actions = buffer<action>(most);
  result.begin = buffer<int>(ranks + 1);
  action* const actions = result.actions.data;
  int* const begin = result.begin.data;
  buffer<int> first_memory(ranks + 1);
  int* const first = first_memory.data;  // index of each rank's first work
  for (int r = 0; r <= ranks; ++r) {
    first[r] = placed.first.data[r] * families;
    begin[r] = first[r] * micro_batches;
  }
  buffer<detail::listed_progress> progress_memory(ranks);
  detail::listed_progress* const progress = progress_memory.data;
  for (int r = 0; r < ranks; ++r) progress[r] = {begin[r], 0, 0, false};

  detail::turns turn(ranks);
  for (int filled = 0; filled < most;) {
    // Ranks act in the order of time, so all actions that are ready at this time are known.
    double const now = turn.now;
    if (now == detail::never) {
      bool const chunks = result.in_flight_limit > 0;
      finding f = fault(law::description,
                        chunks ? "list scheduling is stuck: allow more than the limit in flight, which is "
                               : "list scheduling is stuck: allow more than the limit of bytes in flight, which is ",
                        chunks ? result.in_flight_limit : result.byte_limit);
      for (int r = ranks - 1; r >= 0; --r) f.rank = progress[r].at < begin[r + 1] ? r : f.rank;
      return detail::refused(size, what.name, f);
    }
    int const rank = turn.rank;
    detail::listed_progress const come = progress[rank];
    int const stop = first[rank + 1];
    int taken = first[rank];
    double soonest = detail::never;  // the earliest known start of a later action
    for (; taken < stop; ++taken) {
      double const ready = ready_of[taken];
      if (ready >= soonest || come.in_flight >= room_of[taken]) continue;
      if (counts_bytes && come.bytes > work[taken].bytes_room) continue;
      if (Sliced && work[taken].what.kind == kind::forward && !of_slices.admits(static_cast<int>(work[taken].what.stage)))
        continue;
      if (ready <= now) break;
      soonest = ready;
    }
    if (taken == stop) {
      progress[rank].waits = true;
      turn.next_turn(soonest);
      continue;
    }

    // Reads single fields: a copy of the whole struct would have to wait for the write to one of its fields just before.
    detail::listed_work& one = work[taken];
    int const m = one.taken;
    int const after = m + 1;
    one.taken = after;
    double const end = now + one.length;
    action next = one.what;
    bool const forward = Sliced && next.kind == kind::forward;
    next.micro_batch = static_cast<std::uint32_t>(!Sliced || forward ? m : mirrored(m, slices)) & 0xffffu;
    actions[come.at] = next;
    ++filled;
    progress[rank] = {come.at + 1, come.in_flight + one.change, come.bytes + one.bytes_change, false};
    ready_of[taken] = after < one.known ? starts[taken * micro_batches + after] : detail::never;
    if (Sliced) of_slices.change(static_cast<int>(next.stage), one.change);
    // With slices, the last stage's gradients begin with a microbatch's last slice, after all its slices have run forward.
    bool const turns = Sliced && forward && static_cast<int>(next.stage) == result.stages - 1;
    for (int i = 0; i < one.fed; ++i) {
      if (Sliced && turns && after % slices != 0) continue;
      int const to = one.feeds[i];
      detail::listed_work& other = work[to];
      double const arrives = other.rank == rank ? end : end + communication;
      int const from = Sliced && turns ? after - slices : m;
      starts[to * micro_batches + m] = arrives;
      for (int j = from; Sliced && j < m; ++j) starts[to * micro_batches + j] = arrives;
      other.known = after;
      if (other.taken != from) continue;
      ready_of[to] = arrives;
      // A rank that computes is not woken: it tries again at the end of its action.
      if (progress[other.rank].waits) turn.wake(other.rank, arrives);
    }
    turn.next_turn(end);
  }
  return result;
}

}  // namespace detail

/// Makes the plan of a list schedule at this size, by playing a step.
/// \returns a plan; if the schedule's own limit makes ranks wait for ever, a plan whose `problem` says so
template <class Placement, class Limits>
constexpr plan expand(listing<Placement, Limits> const& what, shape size) {
  // Two returns, since GCC 12's constant evaluator frees a new object of ?: twice.
  if (size.slices > 1) return detail::play_list<true>(what, size);
  return detail::play_list<false>(what, size);
}

}  // namespace chevron
