#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Times of a microbatch that is alone in the pipeline: a part of `bounds`.

namespace chevron::detail {

/// The times of one microbatch that passes through all stages forwards and backwards without waiting for other microbatches.
struct unhindered {
  buffer<double> forward_start;   ///< by stage: from the step's start to the start of F
  buffer<double> backward_start;  ///< by stage: from the step's start to the start of I (or B)
  buffer<double> after;           ///< from the end of I to the end of all actions that depend on it

  constexpr unhindered(plan_view const& plan, cost_view const& costs)
      : forward_start(plan.stages), backward_start(plan.stages), after(plan.stages) {
    int const stages = plan.stages;
    auto const message = [&](int boundary) {
      return plan.rank_of[boundary] != plan.rank_of[boundary + 1] ? costs.of_delay(boundary) : 0.0;
    };
    double now = 0;
    for (int s = 0; s < stages; ++s) {
      if (s > 0) now += message(s - 1);
      forward_start.data[s] = now;
      now += costs.of(kind::forward, s);
    }
    for (int s = stages - 1; s >= 0; --s) {
      backward_start.data[s] = now;
      now += costs.of_input(s);
      if (s > 0) now += message(s - 1);
    }
    for (int s = 0; s < stages; ++s) {
      double const own = costs.of(kind::backward_weight, s);
      double const on = s > 0 ? message(s - 1) + costs.of_input(s - 1) + after.data[s - 1] : 0;
      after.data[s] = own > on ? own : on;
    }
  }
};

/// Factors of microbatches of unequal length, for bounds. The time of a path is linear in a microbatch's factors of
/// computations and of transfers.
struct unequal_lengths {
  sorted_factors computation, transfer;
  owned_costs least;  ///< costs with the least factor of each kind: no microbatch is quicker anywhere
  owned_costs long_one;
  unhindered long_way;                       ///< for the microbatch with the longest computations
  unhindered of_computations, of_transfers;  ///< a path's computations, and its transfers, with factor 1

  constexpr unequal_lengths(plan_view const& plan, cost_view const& costs)
      : computation(costs.lengths.computation, costs.lengths.count, plan.size.units()),
        transfer(costs.lengths.transfer, costs.lengths.count, plan.size.units()),
        least(scaled(costs, plan.stages, computation.least(), transfer.least())),
        long_one(scaled(costs, plan.stages, computation.most(), transfer_of_longest(plan, costs))),
        long_way(plan, long_one.view()),
        of_computations(plan, without_latency(scaled(costs, plan.stages, 1, 0).view())),
        of_transfers(plan, without_latency(scaled(costs, plan.stages, 0, 1).view())) {}

  /// The sum, over `count` microbatches, of the time from the start of a stage's F to the end of its I, each microbatch alone in
  /// the pipeline.
  /// \param at_least the time of one microbatch with the least factors
  /// \param computations,transfers sums of the microbatches' factors
  constexpr double trips(int stage, double at_least, cost_view const& each, int count, double computations,
                         double transfers) const {
    double const input = each.of_input(stage);
    double const compute = of_computations.backward_start.data[stage] + input - of_computations.forward_start.data[stage];
    double const messages = of_transfers.backward_start.data[stage] - of_transfers.forward_start.data[stage];
    return count * at_least + (computations - count * computation.least()) * compute +
           (transfers - count * transfer.least()) * messages;
  }

 private:
  static constexpr double transfer_of_longest(plan_view const& plan, cost_view const& costs) {
    int longest = 0;
    for (int m = 1; m < plan.size.units(); ++m) {
      if (costs.lengths.of_computation(m) > costs.lengths.of_computation(longest)) longest = m;
    }
    return costs.lengths.of_transfer(longest);
  }
  static constexpr cost_view without_latency(cost_view of) {
    of.latency = &no_time;
    of.latency_stride = 0;
    return of;
  }
};

}  // namespace chevron::detail
