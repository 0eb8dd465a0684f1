#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::dual_pipe_v;

LAW(dual_pipe_v, lawful);

// From M = 2P on, with F = I: bubble (P-1)(FB + B - 3W), where FB is the time of a fused pair: the sum of its halves if nothing
// is hidden, the longer half if all of the shorter one is hidden. 2P+1 half-sized chunks on every rank.
constexpr auto closed_forms = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  int const m = plan.size.micro_batches;
  if (m < 2 * p) return true;
  for (costs c : {equal_costs, light_weights}) {
    double const whole = c.backward_input + c.backward_weight;
    if (makespan(plan, c) != ideal(plan, c) + (p - 1) * (c.forward + 2 * whole - 3 * c.backward_weight)) return false;
  }
  return peaks_are(plan, [&](int) { return smaller_of(2 * p + 1, 2 * m); });
};
LAW(dual_pipe_v, closed_forms);

// A pair is a forward and a whole backward; on rank r there are 2(M - 2P + r + 1) + P-1-r of them, but on the last rank one less.
constexpr auto pairs = [](plan_view const& plan) {
  int const p = plan.size.ranks;
  int const m = plan.size.micro_batches;
  if (m < 2 * p) return true;
  for (int r = 0; r < p; ++r) {
    int found = 0;
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      if (plan.actions[i].fused == 0) continue;
      if (plan.actions[i].kind != kind::forward || plan.actions[i + 1].kind != kind::backward) return false;
      ++found;
    }
    if (found != 2 * (m - 2 * p + r + 1) + p - 1 - r - (r == p - 1 ? 1 : 0)) return false;
  }
  return true;
};
LAW(dual_pipe_v, pairs);

// Reference values, P=4, M=8, in chunk units: makespan 27, 47.5 and 28.75 rank units with pairs that hide nothing.
constexpr auto reference = checked<dual_pipe_v, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 54 && makespan(reference, light_weights) == 95);
static_assert(makespan(reference, uneven) == 57.5);
static_assert(peak_in_flight(reference, 0) == 9 && peak_in_flight(reference, 3) == 9);
