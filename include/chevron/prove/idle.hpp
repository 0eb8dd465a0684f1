#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Idle time of ranks, by cause: the pipeline fills, the steady state has gaps, or the pipeline drains.

namespace chevron {

/// The time within the makespan in which a rank does not compute, in the costs' unit. The sum of this time and `busy` is the
/// makespan.
///
/// `fill`, `steady` and `drain` are idle time. `fill` and `drain` occur once in a step, for any number of microbatches;
/// `steady` grows with the number of microbatches.
struct idle_time {
  double fill = 0;           ///< before the rank's first backward
  double steady = 0;         ///< from its first backward to its last forward
  double drain = 0;          ///< after its last forward and after its first backward, until the end of the makespan
  double communicating = 0;  ///< the rank transfers instead of computing: 0 unless transfers occupy ranks

  /// The sum of `fill`, `steady` and `drain`.
  constexpr double idle() const { return fill + steady + drain; }
};

namespace detail {

/// The time for which transfers of the actions [first, last] occupy the actions' own rank: sends if `sent`, otherwise receives.
constexpr double transfers_of(plan_view const& plan, cost_view const& costs, int first, int last, bool sent) {
  step_graph const graph(plan);
  double sum = 0;
  for (int i = first; i <= last; ++i) {
    int const boundary = sent ? graph.crosses(plan.actions[i]) : graph.comes_over(plan.actions[i]);
    if (boundary >= 0) sum += costs.of_message(boundary, static_cast<int>(plan.actions[i].micro_batch));
  }
  return sum;
}

}  // namespace detail

/// The idle time of each rank, for a complete timeline of the plan. In a forward-only plan, time before the rank's first action
/// counts as `fill`, and after its last as `drain`. O(actions).
constexpr buffer<idle_time> idle_times(plan_view const& plan, cost_view const& costs, timeline const& when) {
  bool const sender = costs.occupies_sender();
  bool const receiver = costs.occupies_receiver();
  double const length = makespan(plan, when);
  buffer<idle_time> result(plan.size.ranks);
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const first = plan.begin[r];
    int const stop = plan.begin[r + 1];
    int first_backward = first;
    while (first_backward < stop && (plan.actions[first_backward].kind == kind::forward)) ++first_backward;
    int last_forward = stop - 1;
    while (last_forward > first && plan.actions[last_forward].kind != kind::forward) --last_forward;
    if (first_backward == stop) first_backward = first;

    idle_time sum;
    double free_from = 0;  // the end of the previous action and of its sends
    for (int i = first; i < stop;) {
      int const last = last_of_pair(plan.actions, i, stop);
      double const receives = receiver ? detail::transfers_of(plan, costs, i, last, false) : 0;
      double const sends = sender ? detail::transfers_of(plan, costs, i, last, true) : 0;
      double const idle = when.start.data[i] - receives - free_from;
      (i <= first_backward ? sum.fill : i <= last_forward ? sum.steady : sum.drain) += idle;
      sum.communicating += receives + sends;
      free_from = when.end.data[last] + sends;
      i = last + 1;
    }
    sum.drain += length - free_from;
    result.data[r] = sum;
  }
  return result;
}

}  // namespace chevron
