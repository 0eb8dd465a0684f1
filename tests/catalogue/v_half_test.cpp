#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::v_half;

constexpr int bubble_of(int p) { return p == 1 ? 0 : p == 2 ? 1 : p % 2 == 0 ? 3 * p - 7 : 3 * p - 4; }
constexpr int peak_of(int p) { return (p + 2) / 2 * 2; }

// All laws at every point. From M = P on the bubble is 3P-7 or 3P-4 and the peak, in half-sized chunks, P+2 or P+1: half of
// 1F1B's. Some rank has that peak; all of them are near it.
constexpr auto closed_forms = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (!lawful(plan) || peak_in_flight(plan) > peak_of(p)) return false;
  if (plan.size.micro_batches < p) return true;
  return makespan(plan, equal_costs) == ideal(plan, equal_costs) + bubble_of(p) && peak_in_flight(plan) == peak_of(p);
};
LAW(v_half, closed_forms);

// The values of the authors' code at P = 4, 6, 8.
static_assert(bubble_of(4) == 5 && bubble_of(6) == 11 && bubble_of(8) == 17);
static_assert(peak_of(4) == 2 * 3 && peak_of(6) == 2 * 4 && peak_of(8) == 2 * 5);

// With each microbatch more, the bubble grows by this much and no more.
constexpr double growth(costs const& c) {
  return larger_of(0, larger_of(2 * c.forward - 2 * c.backward_input - c.backward_weight,
                                2 * c.backward_input - 2 * c.forward - c.backward_weight));
}
constexpr bool grows_as_said(int ranks, costs const& c) {
  plan const some = expand(v_half, {ranks, 16}), more = expand(v_half, {ranks, 20});
  return makespan(more, c) - makespan(some, c) == ideal(more, c) - ideal(some, c) + 4 * growth(c);
}
static_assert(growth({10, 10, 5}) == 0 && growth({10, 15, 5}) == 5 && growth({1, 0.5, 0.5}) == 0.5 &&
              growth({1, 1.25, 0.5}) == 0);
static_assert(grows_as_said(4, {10, 10, 5}) && grows_as_said(4, {10, 15, 5}) && grows_as_said(4, {1, 0.5, 0.5}));
static_assert(grows_as_said(5, {1, 1.25, 0.5}) && grows_as_said(7, {1, 3, 1}) && grows_as_said(8, {2, 1, 0.25}));

// The authors' code has bubbles of 140 and 180 at P=4, costs 10, 15, 5 and M = 8 and 16; the last microbatches drain 5 sooner
// here.
constexpr double bubble_at(int micro_batches, costs const& c) {
  plan const made = expand(v_half, {4, micro_batches});
  return makespan(made, c) - ideal(made, c);
}
static_assert(bubble_at(8, {10, 15, 5}) == 135 && bubble_at(16, {10, 15, 5}) == 175);
static_assert(bubble_at(8, {10, 10, 5}) == 75 && bubble_at(16, {10, 10, 5}) == 75);

// For fewer microbatches than fill the pipeline, too, it is never slower than the authors' code, which at P=8 has bubbles of 28,
// 26, 25, 24, 23, 24 for M = 1 … 6: when nothing is ever steady a rank is free in its whole list.
constexpr int small_bubble(int micro_batches) {
  plan const made = expand(v_half, {8, micro_batches});
  return static_cast<int>(makespan(made, equal_costs) - ideal(made, equal_costs));
}
static_assert(small_bubble(1) == 27 && small_bubble(2) == 23 && small_bubble(3) == 19);
static_assert(small_bubble(4) == 15 && small_bubble(5) == 13 && small_bubble(6) == 17);

// Reference values, P=4, M=8, in chunk units; the order at P=2, M=4 in full.
constexpr auto reference = checked<v_half, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 53 && span(reference, equal_costs) == 53);
static_assert(makespan(reference, light_weights) == 95 && makespan(reference, uneven) == 61.5);
static_assert(peaks_are(reference, [](int) { return 6; }));
constexpr auto small = checked<v_half, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(reads(small, 0, "0F0 0F1 3F0 3I0 3W0 3F1 0F2 0I0 3I1 3W1 3F2 0W0 0F3 0I1 3I2 3W2 3F3 3I3 0I2 3W3 0I3 0W1 0W2 0W3"));
static_assert(reads(small, 1, "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 2W3 1W2 1W3"));
