#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::hanayo;

// A claim for all P up to `most_ranks`, one to three waves, M up to 2P.
template <class Claim>
constexpr grid_result over_waves(Claim claim, int waves, int most_ranks) {
  grid_result result;
  for (int p = 1; p <= most_ranks; ++p) {
    for (int m = 1; m <= 2 * p; ++m) {
      plan const made = expand(hanayo, shape{p, m, 2 * waves});
      ++result.points;
      if (!claim(made.view())) return {result.points, shape{p, m, 2 * waves}};
    }
  }
  return result;
}

/// Lawful; V·min(M, P) chunks on the rank that keeps most; turns without messages; and the makespans of the docstring.
constexpr bool as_published(plan_view const& plan) {
  int const p = plan.size.ranks, m = plan.size.micro_batches, v = plan.size.chunks;
  if (!lawful(plan) || peak_in_flight(plan) != v * smaller_of(m, p)) return false;
  if (messages(plan) != 2 * m * v * (p - 1)) return false;
  for (costs const& c : {costs{1, 0.5, 0.5}, costs{1, 1, 1}, costs{1, 1, 2}, costs{2, 0.5, 0.5}}) {
    double const f = c.forward, b = c.backward_input + c.backward_weight, made = makespan(plan, c);
    if (m <= p && made != p * v * (f + b) + 2 * (m - 1) * larger_of(f, b)) return false;
    if (m % p == 0 && f == b && made != m * v * (f + b) + (p - 1) * (f + b)) return false;
  }
  return true;
}
static_assert(over_waves(as_published, 1, 4).holds() && over_waves(as_published, 2, 3).holds());
TEST_CASE("waves are as published") {
  for (int waves = 1; waves <= 4; ++waves) {
    CAPTURE(waves);
    auto const found = over_waves(as_published, waves, 12);
    CHECK_MESSAGE(found.holds(), "P = ", found.failed.ranks, ", M = ", found.failed.micro_batches);
  }
}

// Stages as the paper draws them: with two waves on four ranks, 0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0.
constexpr auto reference = checked<hanayo, shape{.ranks = 4, .micro_batches = 4, .chunks = 4}>;
static_assert(reference.view().rank_of[3] == 3 && reference.view().rank_of[4] == 3 && reference.view().rank_of[7] == 0 &&
              reference.view().rank_of[8] == 0 && reference.view().rank_of[15] == 0);
// Four microbatches on four ranks, T_F + T_B = 1 on a rank: half of 1F1B's bubble of 3 with one wave, a quarter with two.
inline constexpr costs one_wave{0.25, 0.125, 0.125}, two_waves{0.125, 0.0625, 0.0625};
static_assert(makespan(checked<hanayo, shape{4, 4, 2}>, one_wave) == 5.5 && makespan(reference, two_waves) == 4.75);
static_assert(makespan(checked<catalogue::one_f_one_b, shape{4, 4}>, costs{0.5, 0.25, 0.25}) == 7);

// Waves come whole.
static_assert(describe(check(expand(hanayo, shape{4, 4, 3}))).view() == "with this placement chunks can be 2, not 3");
static_assert(describe(check(expand(hanayo, shape{4, 4, 7}))).view() == "with this placement chunks can be 6, not 7");
static_assert(describe(check(expand(hanayo, shape{4, 4, 1}))).view() == "with this placement chunks can be 2, not 1");
