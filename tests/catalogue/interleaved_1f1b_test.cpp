#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::interleaved_1f1b;

// All laws: V=1 and 2 here, V=3 in interleaved_three_static.cpp.
LAW(interleaved_1f1b, lawful);

// Where P divides M: bubble (P-1)(T_F+T_B)/V, that is (P-1)(f+b) in chunk costs; peak min(MV, 2(P-r-1) + (V-1)P + 1) chunks.
LAW(interleaved_1f1b, [](plan_view const& plan) {
  if (plan.size.micro_batches % plan.size.ranks != 0) return true;
  int const p = plan.size.ranks;
  int const v = plan.size.chunks;
  return makespans_are(
             plan,
             [&](costs const& c) { return ideal(plan, c) + (p - 1) * (c.forward + c.backward_input + c.backward_weight); }) &&
         peaks_are(plan, [&](int rank) { return smaller_of(plan.size.micro_batches * v, 2 * (p - rank - 1) + (v - 1) * p + 1); });
});

// Reference values, P=4, M=8, V=2, in chunk units (a rank's time is twice a chunk's).
constexpr auto reference = checked<interleaved_1f1b, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 57 && makespan(reference, light_weights) == 95 &&
              makespan(reference, uneven) == 57);
static_assert(peak_in_flight(reference, 0) == 11 && peak_in_flight(reference, 1) == 9 && peak_in_flight(reference, 2) == 7 &&
              peak_in_flight(reference, 3) == 5);

// Where rounds cannot be even (PyTorch refuses M=5 on P=2): still lawful, and no rank keeps more than one microbatch more.
static_assert(check(expand(interleaved_1f1b, shape{2, 5, 2})).broken == law::none);
