#pragma once

#include <cstddef>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Plays a plan whose slices have costs of their own. Factors (plan/slices.hpp) multiply the costs of a whole microbatch, with
/// one share of attention for all stages. Costs of each slice also contain the time that each slice takes whatever its length,
/// such as the latency of a sum over shards, and have each stage's own share of attention.

namespace chevron {

/// The costs of the slices of a microbatch, the same in each microbatch; owns its memory.
struct sliced_costs {
  /// By slice, at least one: computations and transfers. Latencies, and what transfers occupy, are those of the first. One entry:
  /// microbatches are whole.
  std::vector<owned_costs> slices;
};

namespace detail {

/// Costs of each slice, for `play`. Refers to `sliced_costs`.
struct costs_by_slice : cost_view {
  explicit costs_by_slice(sliced_costs const& costs) : cost_view(costs.slices.front().view()) {
    for (owned_costs const& one : costs.slices) of_slices.push_back(one.view());
  }

  std::vector<cost_view> of_slices;

  cost_view const& of_slice(int unit) const { return of_slices[static_cast<std::size_t>(unit) % of_slices.size()]; }
  double of_action(action a) const { return of_slice(static_cast<int>(a.micro_batch)).of_action(a); }
  double of_pair(action forward_half, action backward_half) const {
    return of_halves(of_action(forward_half), of_action(backward_half));
  }
  double of_message(int boundary, int unit) const { return of_slice(unit).of_message(boundary); }
};

}  // namespace detail

/// The timeline of a plan of as many slices as `costs` has. O(actions).
inline timeline simulate(plan_view const& plan, sliced_costs const& costs) {
  if (costs.slices.size() == 1) return simulate(plan, costs.slices.front().view());
  return detail::simulate_once(plan, detail::costs_by_slice(costs));
}
/// The makespan of that timeline.
inline double makespan(plan_view const& plan, sliced_costs const& costs) { return makespan(plan, simulate(plan, costs)); }
/// The time for which a rank computes.
inline double busy(plan_view const& plan, sliced_costs const& costs, int rank) {
  if (costs.slices.size() == 1) return busy(plan, costs.slices.front().view(), rank);
  return detail::busy_time(plan, detail::costs_by_slice(costs), rank);
}

}  // namespace chevron
