#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::one_f_one_b;

LAW(one_f_one_b, lawful);

// GPipe's makespan with min(M, P-r) chunks in flight on rank r, for any M: also below the warm-up depth.
LAW(one_f_one_b, [](plan_view const& plan) {
  return makespans_are(plan,
                       [&](costs const& c) {
                         return ideal(plan, c) + (plan.size.ranks - 1) * (c.forward + c.backward_input + c.backward_weight);
                       }) &&
         peaks_are(plan, [&](int rank) { return smaller_of(plan.size.micro_batches, plan.size.ranks - rank); });
});

constexpr auto reference = checked<one_f_one_b, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 33 && makespan(reference, light_weights) == 55 &&
              makespan(reference, uneven) == 33);
static_assert(peak_in_flight(reference, 0) == 4 && peak_in_flight(reference, 1) == 3 && peak_in_flight(reference, 2) == 2 &&
              peak_in_flight(reference, 3) == 1);

// The order at two ranks and four microbatches, rank by rank.
constexpr auto small = checked<one_f_one_b, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(reads(small, 0, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"));
static_assert(reads(small, 1, "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"));
