#pragma once

#include <cstddef>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/steps.hpp>
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
/// Bounds of the mean time of a step, for many steps back to back: `steady_step_time` (prove/steps.hpp), also with work between
/// a rank's last action and its next step.
/// \param ending `void(double const* end, double* clock)`: gets the ends of a step's actions, indexed as `plan_view::actions`,
/// and by rank the end of its last action, which it raises to the time at which the rank begins its next step, by sums and
/// maxima of these times; `double most()` returns an upper bound of what it adds to any of them
/// \param most_steps the number of steps to be played at most
/// \returns both bounds, in the costs' unit
template <class Ending = detail::no_ending>
step_time steady_step_time(plan_view const& plan, sliced_costs const& costs, Ending const& ending = {}, int most_steps = 64) {
  if (costs.slices.size() == 1) return detail::steady_time(plan, costs.slices.front().view(), ending, most_steps);
  return detail::steady_time(plan, detail::costs_by_slice(costs), ending, most_steps);
}
/// The time for which a rank computes.
inline double busy(plan_view const& plan, sliced_costs const& costs, int rank) {
  if (costs.slices.size() == 1) return busy(plan, costs.slices.front().view(), rank);
  return detail::busy_time(plan, detail::costs_by_slice(costs), rank);
}

}  // namespace chevron
