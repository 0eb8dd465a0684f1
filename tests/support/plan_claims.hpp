#pragma once

#include <string_view>

#include <chevron/schedule.hpp>

/// \file
/// Claims of tests about plans, checked while compiling and at run time.

namespace chevron::tests {

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
