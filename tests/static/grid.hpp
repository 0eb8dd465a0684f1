#pragma once

#include <chevron/schedule.hpp>

/// \file
/// Compile-time tests over a grid of shapes: a claim is a function of a plan, and the first shape for which it fails comes back.

namespace chevron::tests {

struct grid_result {
  int points = 0;
  int failed_ranks = 0;
  int failed_micro_batches = 0;
  int failed_chunks = 0;
  constexpr bool holds() const { return points > 0 && failed_ranks == 0; }
};

/// Part of the grid, so that no single constant expression gets too large: P in [first_ranks, last_ranks], V in
/// [first_chunks, last_chunks] as far as the placement allows.
struct part {
  int first_ranks = 1;
  int last_ranks = 8;
  int first_chunks = 1;
  int last_chunks = 3;
  int last_micro_batches = 32;
};

/// Every P ≤ 8, M ≤ 32 and V ≤ 3 the placement allows, or a part of them.
template <class Description, class Claim>
constexpr grid_result over_grid(Description const& schedule, Claim claim, part of = {}) {
  grid_result result;
  for (int chunks = of.first_chunks; chunks <= of.last_chunks; ++chunks) {
    if (!schedule.where.allows(chunks)) continue;
    for (int ranks = of.first_ranks; ranks <= of.last_ranks; ++ranks) {
      for (int micro_batches = 1; micro_batches <= of.last_micro_batches; ++micro_batches) {
        plan const made = expand(schedule, shape{ranks, micro_batches, chunks});
        ++result.points;
        if (!claim(made.view())) return {result.points, ranks, micro_batches, chunks};
      }
    }
  }
  return result;
}

/// Costs in chunk units used by all closed forms: equal; twice as long forwards and input gradients; uneven ones.
inline constexpr costs equal_costs{1, 1, 1, 0};
inline constexpr costs light_weights{2, 2, 1, 0};
inline constexpr costs uneven{1, 1.5, 0.5, 0};

/// Time every rank computes in a step, when all stages cost the same: the makespan without any bubble.
constexpr double ideal(plan_view const& plan, costs const& c) {
  return plan.size.micro_batches * plan.size.chunks * (c.forward + c.backward_input + c.backward_weight);
}

/// All laws of the plan.
inline constexpr auto lawful = [](plan_view const& plan) { return check(plan).broken == law::none; };

/// A claim about the makespan under each of the three costs.
template <class Expected>
constexpr bool makespans_are(plan_view const& plan, Expected expected) {
  return makespan(plan, equal_costs) == expected(equal_costs) && makespan(plan, light_weights) == expected(light_weights) &&
         makespan(plan, uneven) == expected(uneven);
}

template <class Expected>
constexpr bool peaks_are(plan_view const& plan, Expected expected) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (peak_in_flight(plan, r) != expected(r)) return false;
  }
  return true;
}

/// Whether a rank's list reads so: `reads(plan, 0, "0F0 0B0")`.
constexpr bool reads(plan_view const& plan, int rank, std::string_view expected) {
  text got;
  for (int i = 0; i < plan.length(rank); ++i) {
    if (i > 0) got.append(' ');
    append(got, plan.at(rank, i));
  }
  return got.view() == expected;
}

constexpr int smaller_of(int a, int b) { return a < b ? a : b; }
constexpr double larger_of(double a, double b) { return a > b ? a : b; }

}  // namespace chevron::tests
