#include "by_hand.hpp"
#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::tests;

// 1F1B on two ranks with every steady forward and backward fused. In time, with F=1 and B=2 and nothing hidden:
//   rank 0   F0 F1 . . . (F2 B0) . . . (F3 B1) . . . B2 B3
//   rank 1   . F0 (F1 B0) . . . (F2 B1) . . . (F3 B2) B3
constexpr plan fused_pairs() {
  return by_hand({"0F0 0F1 (0F2;0B0) (0F3;0B1) 0B2 0B3", "1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) 1B3"}, {0, 1}, 4);
}

constexpr bool runs(int action, double start, double end, costs const& c) {
  plan const made = fused_pairs();
  timeline const when = simulate(made, c);
  return when.complete && when.start.data[action] == start && when.end.data[action] == end;
}

// Both halves wait for the inputs of both, and end together.
static_assert(runs(2, 5, 8, costs{}) && runs(3, 5, 8, costs{}));   // rank 0: F2 would be ready at 2, B0 is at 5
static_assert(runs(9, 2, 5, costs{}) && runs(10, 2, 5, costs{}));  // rank 1: B0 and F1, at once
static_assert(runs(11, 8, 11, costs{}) && runs(12, 8, 11, costs{}));
static_assert(makespan(fused_pairs(), costs{}) == 21 && busy(fused_pairs(), costs{}, 0) == 12);

// Each pair saves the hidden share of its shorter half: the forward, half of the forward; the backward, if the forward is
// longer.
static_assert(makespan(fused_pairs(), costs{.hidden = 1}) == 16 && busy(fused_pairs(), costs{.hidden = 1}, 0) == 10);
static_assert(makespan(fused_pairs(), costs{.hidden = 0.5}) == 18.5 && busy(fused_pairs(), costs{.hidden = 0.5}, 1) == 10.5);
static_assert(busy(fused_pairs(), costs{.forward = 8, .hidden = 1}, 0) == 8 + 8 + 8 + 8 + 2 + 2);

// A pair whose halves wait for each other's results never runs: 1B0 needs 1F0, which is only there when the pair has ended.
constexpr bool never_ends() {
  plan const made = by_hand({"0F0 0B0", "(1F0;1B0)"}, {0, 1}, 1);
  timeline const when = simulate(made, costs{});
  return !when.complete && when.end.data[0] == 1 && when.end.data[2] == 0;
}
static_assert(never_ends());

// The last action of a list is marked as a first half without a second; the simulation runs such a broken plan, too.
constexpr plan cut_short() { return by_hand({"0F0 0B0 (0F1"}, {0}, 2); }
static_assert(simulate(cut_short(), costs{}).complete && makespan(cut_short(), costs{}) == 4);
