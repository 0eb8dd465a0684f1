#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::interleaved_zero_bubble;

LAW(interleaved_zero_bubble, lawful);

// Where P divides M: bubble (P-1)(T_F + T_I - T_W)/V, that is (P-1)(f + i - w) in chunk costs, and V·P chunks on every rank.
LAW(interleaved_zero_bubble, [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (plan.size.micro_batches % p != 0) return true;
  return makespans_are(
             plan,
             [&](costs const& c) { return ideal(plan, c) + (p - 1) * (c.forward + c.backward_input - c.backward_weight); }) &&
         peaks_are(plan, [&](int) { return p * plan.size.chunks; });
});

constexpr auto reference = checked<interleaved_zero_bubble, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 51 && makespan(reference, light_weights) == 89 &&
              makespan(reference, uneven) == 54);
