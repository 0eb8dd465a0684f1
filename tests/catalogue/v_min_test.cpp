#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::v_min;

constexpr int bubble_of(int p) { return p == 1 ? 0 : p % 3 == 0 ? 4 * p - 7 : 4 * p - 5; }
constexpr int peak_of(int p) { return (p + 4) / 3 * 2; }

// All laws at every point. From M = P on these hold; the peak, in half-sized chunks, is a third of 1F1B's, and a few ranks have
// one microbatch less.
constexpr auto closed_forms = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (!lawful(plan) || peak_in_flight(plan) > peak_of(p)) return false;
  if (plan.size.micro_batches < p) return true;
  return makespan(plan, equal_costs) == ideal(plan, equal_costs) + bubble_of(p) && peak_in_flight(plan) == peak_of(p);
};
LAW(v_min, closed_forms);

// The values of the authors' code at P = 4, 6, 8.
static_assert(bubble_of(4) == 11 && bubble_of(6) == 17 && bubble_of(8) == 27);
static_assert(peak_of(4) == 2 * 2 && peak_of(6) == 2 * 3 && peak_of(8) == 2 * 4);

// With each microbatch more, the bubble grows by this much: a hop lasts as long as the slower of F and I, six hops make an
// interval.
constexpr double growth(costs const& c) {
  return larger_of(0, 6 * larger_of(c.forward, c.backward_input) - 2 * (c.forward + c.backward_input + c.backward_weight));
}
constexpr bool grows_as_said(int ranks, costs const& c) {
  plan const some = expand(v_min, {ranks, 16}), more = expand(v_min, {ranks, 20});
  return makespan(more, c) - makespan(some, c) == ideal(more, c) - ideal(some, c) + 4 * growth(c);
}
static_assert(growth({10, 10, 5}) == 10 && growth({1, 1.5, 0.5}) == 3 && growth({1, 0.5, 1.5}) == 0);
static_assert(grows_as_said(4, {10, 10, 5}) && grows_as_said(4, {1, 1.5, 0.5}) && grows_as_said(4, {1, 0.5, 1.5}));
static_assert(grows_as_said(3, {1, 0.5, 1}) && grows_as_said(5, {1, 1.25, 0.5}) && grows_as_said(8, {2, 1, 0.25}));

// The bubbles of the authors' code at P=4, costs 10, 10, 5.
constexpr double bubble_at(int micro_batches, costs const& c) {
  plan const made = expand(v_min, {4, micro_batches});
  return makespan(made, c) - ideal(made, c);
}
static_assert(bubble_at(8, {10, 10, 5}) == 185 && bubble_at(16, {10, 10, 5}) == 265);

// For fewer microbatches than fill the pipeline it is never slower than the authors' code, which at P=8 has bubbles of 27, 26, 26
// and 27 for M = 1 … 4.
constexpr int small_bubble(int micro_batches) {
  plan const made = expand(v_min, {8, micro_batches});
  return static_cast<int>(makespan(made, equal_costs) - ideal(made, equal_costs));
}
static_assert(small_bubble(1) == 27 && small_bubble(2) == 23 && small_bubble(3) == 19 && small_bubble(4) == 27);

// Reference values, P=4, M=8, in chunk units; the order at P=2, M=4 in full.
constexpr auto reference = checked<v_min, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 59 && span(reference, equal_costs) == 59);
static_assert(makespan(reference, light_weights) == 117 && makespan(reference, uneven) == 83.5);
static_assert(peaks_are(reference, [](int) { return 4; }));
constexpr auto small = checked<v_min, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(reads(small, 0, "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0F3 0I2 0W2 3F3 3I3 3W3 0I3 0W3"));
static_assert(reads(small, 1, "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3"));
