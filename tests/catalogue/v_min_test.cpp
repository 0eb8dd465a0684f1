#include "grid.hpp"

#include <chevron/prove/bounds/bound.hpp>

using namespace chevron;
using namespace chevron::tests;
using catalogue::v_min;

constexpr double bubble_of(int p) {
  constexpr int less[] = {7, 5, 9};  // by P mod 3
  return larger_of(p - 1, 4 * p - less[p % 3]);
}
constexpr int peak_of(int p) { return (p + 4) / 3 * 2; }

// All laws at every point, and at equal costs no order of these chunks is shorter in the same memory: the lower bound is met.
// From M = P on the closed forms hold; the peak, in half-sized chunks, is a third of 1F1B's.
constexpr auto closed_forms = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  if (!lawful(plan) || plan.in_flight_limit != peak_of(p) || peak_in_flight(plan) > peak_of(p)) return false;
  if (makespan(plan, equal_costs) != bounds(plan, equal_costs).makespan) return false;
  if (plan.size.micro_batches < p) return true;
  return makespan(plan, equal_costs) == ideal(plan, equal_costs) + bubble_of(p) && peak_in_flight(plan) == peak_of(p);
};
LAW(v_min, closed_forms);

// The values of the authors' code at P = 4, 6, 8, but for a bubble of 27 at P = 8 in the same memory.
static_assert(bubble_of(4) == 11 && bubble_of(6) == 17 && bubble_of(8) == 27 - 4);
static_assert(peak_of(4) == 2 * 2 && peak_of(6) == 2 * 3 && peak_of(8) == 2 * 4);

// As short as Primus's V-Min (AMD-AGI/Primus, ScheduleZBVGreedy with memory_config "min", at fd1eeab: makespans and peaks of the
// orders that it gives), and in no more memory.
struct published {
  int ranks, micro_batches, makespan, peak;
};
constexpr published primus[] = {
    {2, 2, 14, 4}, {2, 4, 26, 4}, {2, 8, 50, 4}, {2, 16, 98, 4},  {2, 32, 194, 4},  //
    {4, 2, 22, 4}, {4, 4, 35, 4}, {4, 8, 59, 4}, {4, 16, 107, 4}, {4, 32, 203, 4},  //
    {8, 2, 38, 4}, {8, 4, 44, 8}, {8, 8, 74, 8}, {8, 16, 122, 8}, {8, 32, 218, 8},  //
};
constexpr bool as_short_as_theirs() {
  for (published const& theirs : primus) {
    plan const made = expand(v_min, {theirs.ranks, theirs.micro_batches});
    if (makespan(made, equal_costs) > theirs.makespan || peak_in_flight(made) > theirs.peak) return false;
  }
  return true;
}
static_assert(as_short_as_theirs());

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
static_assert(small_bubble(1) == 27 && small_bubble(2) == 23 && small_bubble(3) == 19 && small_bubble(4) == 15);

// Reference values, P=4, M=8, in chunk units; the order at P=2, M=4 in full.
constexpr auto reference = checked<v_min, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 59 && span(reference, equal_costs) == 59);
static_assert(makespan(reference, light_weights) == 117 && makespan(reference, uneven) == 83.5);
static_assert(peaks_are(reference, [](int) { return 4; }));
constexpr auto small = checked<v_min, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(reads(small, 0, "0F0 0F1 3F0 3I0 3F1 3W0 0I0 0F2 0W0 3I1 3F2 3W1 0I1 0F3 3I2 3W2 3F3 3I3 0I2 3W3 0I3 0W1 0W2 0W3"));
static_assert(reads(small, 1, "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2W1 1W1 1F3 2F3 2I2 1I2 2I3 1I3 2W2 2W3 1W2 1W3"));
