#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Finds the cycle of ranks that wait for each other, once `find_deadlock` (prove/check.hpp) has got stuck. `append_deadlock`
/// (plan/finding.hpp) writes the error's sentence.

namespace chevron::detail {

/// A cycle of ranks, each of which waits for the next.
struct wait_cycle {
  int first = 0;  ///< the rank of the cycle for which `number_of` is lowest
  int links = 0;  ///< number of ranks in the cycle
  int last = 0;   ///< the rank that waits for `first`
};

/// Finds the cycle into which the waits of a stuck rank lead.
/// \param ranks     at least the number of ranks that can be stuck
/// \param waits_for waits_for(rank): the rank that a stuck rank waits for
/// \param number_of number_of(rank): the cycle begins at the rank with the lowest number
template <class WaitsFor, class NumberOf>
constexpr wait_cycle cycle_of_waits(int stuck, int ranks, WaitsFor const& waits_for, NumberOf const& number_of) {
  int on_cycle = stuck;
  for (int hop = 0; hop < ranks; ++hop) on_cycle = waits_for(on_cycle);
  wait_cycle out{on_cycle, 1, on_cycle};
  for (int at = waits_for(on_cycle); at != on_cycle; at = waits_for(at)) {
    if (number_of(at) < number_of(out.first)) out.first = at;
    ++out.links;
  }
  out.last = out.first;
  for (int hop = 0; hop + 1 < out.links; ++hop) out.last = waits_for(out.last);
  return out;
}
template <class WaitsFor>
constexpr wait_cycle cycle_of_waits(int stuck, int ranks, WaitsFor const& waits_for) {
  return cycle_of_waits(stuck, ranks, waits_for, [](int rank) { return rank; });
}

/// The finding about ranks that wait for each other; none if all ranks reached the ends of their lists.
/// \param begin, next by rank: the index of the list's first action (`begin`) and of the first action that did not run (`next`)
/// \param queued queued(rank): the first action that did not run
/// \param awaited_by awaited_by(rank): the action of another rank for which `queued(rank)` waits
template <class Queued, class Awaited>
constexpr finding deadlock_of(plan_view const& plan, int const* begin, int const* next, Queued const& queued,
                              Awaited const& awaited_by) {
  int const ranks = plan.size.ranks;
  int stuck = 0;
  while (stuck < ranks && next[stuck] == begin[stuck + 1]) ++stuck;
  if (stuck == ranks) return {};
  auto const waits_for = [&](int rank) { return static_cast<int>(plan.rank_of[awaited_by(rank).stage]); };
  wait_cycle const cycle = cycle_of_waits(stuck, ranks, waits_for);
  int const lowest = cycle.first, other = waits_for(lowest);
  return {.broken = law::deadlock,
          .rank = lowest,
          .position = next[lowest] - begin[lowest],
          .what = queued(lowest),
          .other = awaited_by(lowest),
          .other_rank = other,
          .behind = queued(other),
          .then = awaited_by(other),
          .last_behind = awaited_by(cycle.last),
          .links = cycle.links};
}

}  // namespace chevron::detail
