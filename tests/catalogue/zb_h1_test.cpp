#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::zb_h1;

LAW(zb_h1, lawful);

// Bubble (P-1)(T_F + T_I - T_W), exact where T_W ≤ min(T_F, T_I), which all three costs are, and M ≥ P; below, the makespan is
// (M+P-1)(T_F+T_I) + T_W (arXiv 2401.10241, appendix). At most P chunks on every rank.
LAW(zb_h1, [](plan_view const& plan) {
  int const p = plan.size.ranks;
  int const m = plan.size.micro_batches;
  return makespans_are(plan,
                       [&](costs const& c) {
                         return m >= p ? ideal(plan, c) + (p - 1) * (c.forward + c.backward_input - c.backward_weight)
                                       : (m + p - 1) * (c.forward + c.backward_input) + c.backward_weight;
                       }) &&
         peaks_are(plan, [&](int) { return smaller_of(m, p); });
});

// Weight gradients longer than forwards: the closed form no longer holds, the makespan is larger.
static_assert(makespan(expand(zb_h1, shape{4, 8}), costs{1, 1, 2}) > 8 * 4 + 3 * (1 + 1 - 2));

constexpr auto reference = checked<zb_h1, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 27 && makespan(reference, light_weights) == 49 &&
              makespan(reference, uneven) == 30);
static_assert(span(reference, equal_costs) == 27);
