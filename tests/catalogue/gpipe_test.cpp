#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::gpipe;

LAW(gpipe, lawful);

// Makespan M(T_F+T_B) + (P-1)(T_F+T_B), whatever the costs; every rank keeps all M microbatches.
LAW(gpipe, [](plan_view const& plan) {
  return makespans_are(plan,
                       [&](costs const& c) {
                         return ideal(plan, c) + (plan.size.ranks - 1) * (c.forward + c.backward_input + c.backward_weight);
                       }) &&
         peaks_are(plan, [&](int) { return plan.size.micro_batches; });
});

// Reference values, P=4, M=8.
constexpr auto reference = checked<gpipe, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 33 && makespan(reference, light_weights) == 55 &&
              makespan(reference, uneven) == 33);
static_assert(span(reference, equal_costs) == 33);
static_assert(messages(reference) == 2 * 3 * 8);
