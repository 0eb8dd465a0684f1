#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::zb_h2;

LAW(zb_h2, lawful);

// From M = 2P-1 on and for T_W ≤ min(T_F, T_I): span bubble (P-1)(T_F + T_I - 2T_W), makespan bubble (P-1)·max(T_F, T_F + T_I -
// 2T_W), 2P-1 chunks on every rank.
LAW(zb_h2, [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (plan.size.micro_batches < 2 * p - 1) return true;
  for (costs const& c : {equal_costs, light_weights, uneven}) {
    timeline const when = simulate(plan, c);
    double const left = c.forward + c.backward_input - 2 * c.backward_weight;
    // Where a rank's W cannot fill the whole gap, its idle time moves into the middle and the span grows with the
    // makespan.
    if (left <= 0 && span(plan, when) != ideal(plan, c) + (p - 1) * left) return false;
    if (makespan(plan, when) != ideal(plan, c) + (p - 1) * larger_of(c.forward, left)) return false;
  }
  return peaks_are(plan, [&](int) { return 2 * p - 1; });
});

constexpr auto reference = checked<zb_h2, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 27 && span(reference, equal_costs) == 24);
static_assert(makespan(reference, light_weights) == 46 && makespan(reference, uneven) == 28.5);
