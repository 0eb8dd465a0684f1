#pragma once

/// \file
/// Ranks that wait for each other in a circle.

namespace chevron::detail {

/// Finds the cycle in which a chain of waits ends, where each stuck rank waits for another stuck one.
struct wait_cycle {
  int first = 0;  ///< the rank of the cycle with the lowest `number_of`
  int links = 0;  ///< ranks of the cycle
  int last = 0;   ///< the rank that waits for `first`
};

/// Follows the chain of waits from a stuck rank into its cycle.
/// \param ranks     at least as many as can be stuck
/// \param waits_for waits_for(rank): the rank that a stuck rank waits for
/// \param number_of number_of(rank): which rank of the cycle comes first
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

}  // namespace chevron::detail
