#include "grid.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;
using catalogue::interleaved_1f1b_with;
using catalogue::interleaved_zero_bubble_with;

// Groups of N microbatches, for every P, V, M and every N from min(M, P) to M, Megatron's P ≤ N ≤ M with M mod N zero or at least
// P among them: lawful, with the docstrings' peaks and, from M = P on, their makespans.
struct reach {
  int most_ranks, most_chunks, most_micro_batches;
};
template <class Make, class Claim>
constexpr grid_result over_groups(reach of, Make make, Claim claim) {
  grid_result result;
  for (int p = 1; p <= of.most_ranks; ++p) {
    for (int v = 1; v <= of.most_chunks; ++v) {
      for (int m = 1; m <= of.most_micro_batches; ++m) {
        for (int group = smaller_of(m, p); group <= m; ++group) {
          plan const made = expand(make(group), shape{p, m, v});
          int const rest = m % group;
          ++result.points;
          if (!lawful(made) || !claim(made.view(), rest > 0 && rest < p ? group + rest : group))
            return {result.points, shape{p, m, v}};
        }
      }
    }
  }
  return result;
}

constexpr bool f_b(plan_view const& plan, int group) {
  int const p = plan.size.ranks, v = plan.size.chunks, m = plan.size.micro_batches;
  auto const expected = [&](costs const& c) {
    return ideal(plan, c) + (p - 1) * (c.forward + c.backward_input + c.backward_weight);
  };
  return peaks_are(plan, [&](int r) { return smaller_of(m * v, (v - 1) * group + 2 * (p - 1 - r) + 1); }) &&
         (m < p || makespan(plan, light_weights) == expected(light_weights));
}
constexpr bool f_i_w(plan_view const& plan, int group) {
  int const p = plan.size.ranks, v = plan.size.chunks, m = plan.size.micro_batches;
  auto const expected = [&](costs const& c) {
    return ideal(plan, c) + (p - 1) * (c.forward + c.backward_input - c.backward_weight);
  };
  return peaks_are(plan, [&](int) { return (v - 1) * group + smaller_of(m, p); }) &&
         (m < p || makespan(plan, light_weights) == expected(light_weights));
}
constexpr auto make_f_b = [](int group) { return interleaved_1f1b_with(group); };
constexpr auto make_f_i_w = [](int group) { return interleaved_zero_bubble_with(group); };
static_assert(over_groups({3, 3, 7}, make_f_b, f_b).holds());
static_assert(over_groups({3, 3, 7}, make_f_i_w, f_i_w).holds());
TEST_CASE("groups of any size") {
  for (auto const& found : {when_run(8, [](int most) { return over_groups({most, 3, 20}, make_f_b, f_b); }),
                            when_run(8, [](int most) { return over_groups({most, 3, 20}, make_f_i_w, f_i_w); })})
    CHECK_MESSAGE(found.holds(), "P = ", found.failed.ranks, ", M = ", found.failed.micro_batches, ", V = ", found.failed.chunks);
}

// A group may depend on the size of the pipeline; with N = P it is the schedule of the catalogue wherever P divides M.
inline constexpr auto doubled = interleaved_1f1b_with(2 * ranks);
static_assert(peak_in_flight(checked<doubled, shape{.ranks = 4, .micro_batches = 16}>, 0) == 8 + 6 + 1);
inline constexpr auto by_rank = interleaved_1f1b_with(ranks);
constexpr bool same_as_catalogue() {
  for (int p = 1; p <= 4; ++p) {
    for (int rounds = 1; rounds <= 3; ++rounds) {
      plan const one = expand(by_rank, shape{p, p * rounds, 3}),
                 other = expand(catalogue::interleaved_1f1b, shape{p, p * rounds, 3});
      for (int i = 0; i < one.view().total(); ++i) {
        if (!(one.actions.data[i] == other.actions.data[i])) return false;
      }
    }
  }
  return true;
}
static_assert(same_as_catalogue());

// Rank 0's order of chunks: ten microbatches in groups of four are 4 + 4 + 2; on three ranks the last two go with the first four.
constexpr int run_of_first_chunk(int ranks_asked) {
  plan const made = expand(interleaved_1f1b_with(4), shape{ranks_asked, 10, 2});
  int run = 0;
  while (made.view().at(0, run).stage == 0) ++run;
  return run;
}
static_assert(run_of_first_chunk(2) == 4 && run_of_first_chunk(3) == 6);

// A group too small for the ranks is named with the size it needs.
static_assert(describe(check(expand(interleaved_1f1b_with(3), shape{4, 8, 2}))).view() ==
              "a group must have a microbatch for each rank, at least 4, not 3");
static_assert(describe(check(expand(interleaved_zero_bubble_with(1), shape{4, 3, 2}))).view() ==
              "a group must have a microbatch for each rank, at least 3, not 1");
static_assert(check(expand(interleaved_1f1b_with(100), shape{4, 3, 2})).broken == law::none);
