#pragma once

#include <chevron/prove/critical_path.hpp>
#include <chevron/prove/idle.hpp>
#include <chevron/prove/steps.hpp>

#include "support/plan_claims.hpp"

/// \file
/// Claims on the analyses of any plan, or of a published schedule: checked for some shapes while compiling, for many when run.

namespace chevron::tests {

// Costs that doubles hold exactly, so that equal means equal: with messages beside the computations, in their way, and in each
// other's.
inline constexpr costs exact_costs[] = {equal_costs,
                                        {1, 1.5, 0.5, 0.25},
                                        {.communication = 0.5, .communication_occupies = occupies::sender},
                                        {.communication = 0.25, .communication_occupies = occupies::receiver},
                                        {1, 2, 1, 0.5, 0.5, occupies::both},
                                        {.communication = 2, .communication_occupies = occupies::wire, .latency = 0.5},
                                        {.communication = 0.25, .first_input_gradient = false}};

/// Every rank's time is accounted for; the critical path is a chain without a gap from 0 to the end.
inline constexpr auto accounted_for = [](plan_view const& plan) {
  for (costs const& c : exact_costs) {
    timeline const when = simulate(plan, c);
    double const all = makespan(plan, when);
    buffer<idle_time> const idle = idle_times(plan, c, when);
    for (int r = 0; r < plan.size.ranks; ++r) {
      idle_time const& t = idle.data[r];
      if (t.fill < 0 || t.steady < 0 || t.drain < 0) return false;
      if (t.idle() + t.communicating + busy(plan, c, r) != all) return false;
      if (!c.view().occupies_sender() && !c.view().occupies_receiver() && t.communicating != 0) return false;
    }
    double at = 0;
    int before = -1;
    for (path_step const& step : critical_path_of(plan, c, when)) {
      at += step.communicating;
      if (when.start.data[step.action] != at || step.rank != plan.rank_of[plan.actions[step.action].stage]) return false;
      if (before >= 0 && step.by_message == (plan.rank_of[plan.actions[before].stage] == step.rank)) return false;
      at = when.end.data[step.action];
      before = step.action;
    }
    if (at != all) return false;
  }
  return true;
};

/// GPipe and 1F1B lose the same, at different times. From P microbatches on, rank r of 1F1B waits for the first forward to reach
/// it and for the first backward to come back; after its last forward, for others between its last backwards.
inline constexpr auto idle_of_one_f_one_b = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (plan.size.micro_batches < p) return true;
  for (costs const& c : {equal_costs, light_weights, uneven}) {
    double const f = c.forward;
    double const b = c.backward_input + c.backward_weight;
    buffer<idle_time> const idle = idle_times(plan, c, simulate(plan, c));
    for (int r = 0; r < p; ++r) {
      idle_time const& t = idle.data[r];
      if (t.fill != r * f + (p - 1 - r) * b || t.steady != 0 || t.drain != (p - 1 - r) * f + r * b) return false;
    }
  }
  return true;
};

/// In many steps back to back no rank is idle: ZB-H2 and ZB-V where all costs are equal, from 2P-1 microbatches on.
inline constexpr auto steady_is_busy = [](plan_view const& plan) {
  if (plan.size.micro_batches < 2 * plan.size.ranks - 1) return true;
  step_time const t = steady_step_time(plan, equal_costs);
  return t.most == ideal(plan, equal_costs) && t.least == t.most && t.most == span(plan, equal_costs);
};

/// A step takes the span, from the second one on; the steps in a row, as one plan, say the same.
inline constexpr auto steady_is_span = [](plan_view const& plan) {
  for (costs const& c : {equal_costs, light_weights, uneven}) {
    timeline const when = simulate(plan, c);
    step_time const t = steady_step_time(plan, c);
    if (!t.settled() || t.most != span(plan, when)) return false;
    if (makespan(back_to_back(plan, 3), c) != makespan(plan, when) + 2 * t.most) return false;
  }
  return true;
};

}  // namespace chevron::tests
