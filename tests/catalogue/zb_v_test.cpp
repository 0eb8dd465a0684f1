#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::zb_v;

LAW(zb_v, lawful);

// From M = 2P-1 on: makespan bubble (P-1)·max(f, 2(f-w)) where f = i ≥ w, span bubble at most 2(P-1)(max(f, i) - w), and 2P
// half-sized chunks on every rank: as much memory as 1F1B's first rank.
constexpr auto closed_forms = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (plan.size.micro_batches < 2 * p - 1) return true;
  for (costs const& c : {equal_costs, light_weights, uneven}) {
    timeline const when = simulate(plan, c);
    bool const exact = c.forward == c.backward_input;
    if (exact && makespan(plan, when) != ideal(plan, c) + (p - 1) * larger_of(c.forward, 2 * (c.forward - c.backward_weight)))
      return false;
    if (span(plan, when) > ideal(plan, c) + 2 * (p - 1) * (larger_of(c.forward, c.backward_input) - c.backward_weight))
      return false;
  }
  return peaks_are(plan, [&](int) { return 2 * p; });
};
LAW(zb_v, closed_forms);

// Below 2P-1 microbatches the bubble grows: at P=4, 6 chunk units at M=4 and 12 at M=1.
static_assert(makespan(expand(zb_v, shape{4, 4}), equal_costs) == 4 * 6 + 6);
static_assert(makespan(expand(zb_v, shape{4, 1}), equal_costs) == 1 * 6 + 12);

// Reference values, P=4, M=8, in chunk units: makespan 25.5 and span 24 rank units at equal costs.
constexpr auto reference = checked<zb_v, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 51 && span(reference, equal_costs) == 48);
static_assert(makespan(reference, light_weights) == 86 && makespan(reference, uneven) == 54);
static_assert(peak_in_flight(reference, 0) == 8 && peak_in_flight(reference, 3) == 8);
