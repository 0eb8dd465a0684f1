#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::one_f_one_b;
using catalogue::one_f_one_b_recompute;

LAW(one_f_one_b_recompute, lawful);

// Each of these costs is of F, B without recomputation, and R; the plan and 1F1B with R inside B.
constexpr bool hides_recomputation(plan_view const& plan) {
  int const p = plan.size.ranks, m = plan.size.micro_batches;
  chevron::plan const inside = expand(one_f_one_b, plan.size);
  for (auto const [f, b, r] : {std::array{1., 2., 1.}, std::array{2., 3., 2.}, std::array{3., 7., 3.}}) {
    costs const ahead{.forward = f, .backward_input = b, .backward_weight = 0};
    costs const in_backward{.forward = f, .backward_input = b + r, .backward_weight = 0};
    double const length = makespan(plan, ahead), of_1f1b = makespan(inside, in_backward);
    if (of_1f1b != (m + p - 1) * (f + b + r)) return false;
    if (p > 1 && m > 1 && length != of_1f1b - (p - 1) * r - 2 * r) return false;
    if (p > 1 && !(length < of_1f1b)) return false;
    // The pipeline adds a time to the M microbatches of its slowest rank; R's do not lengthen that time.
    if (p > 1 && m > 1 && !(length - m * (f + b + r) < of_1f1b - m * (f + b + r))) return false;
  }
  return true;
}
LAW(one_f_one_b_recompute, hides_recomputation);

// Chunks as in 1F1B, of which all but one are inputs alone.
LAW(one_f_one_b_recompute, [](plan_view const& plan) {
  sizes const bytes{.activation = 100, .message = 1, .input = 3};
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const chunks = smaller_of(plan.size.micro_batches, plan.size.ranks - r);
    if (peak_in_flight(plan, r) != chunks) return false;
    bool const last = r == plan.size.ranks - 1;
    if (peak_bytes(plan, bytes, r) != 100 + (last ? 0 : (chunks - 1) * 3)) return false;
  }
  return true;
});

// It is 1F1B with an R before each B.
LAW(one_f_one_b, [](plan_view const& plan) {
  chevron::plan const made = with_recomputation(plan), named = expand(one_f_one_b_recompute, plan.size);
  if (made.actions.count != named.actions.count) return false;
  for (int i = 0; i < made.actions.count; ++i) {
    if (!(made.actions.data[i] == named.actions.data[i])) return false;
  }
  return true;
});

constexpr auto small = checked<one_f_one_b_recompute, shape{.ranks = 2, .micro_batches = 3}>;
static_assert(reads(small, 0, "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2"));
static_assert(reads(small, 1, "1F0 1B0 1F1 1B1 1F2 1B2"));
constexpr auto lowered_small = lowered<one_f_one_b_recompute, shape{.ranks = 2, .micro_batches = 3}>;
static_assert(!check(lowered_small.view()));

// A declared limit counts inputs from F to R, and everything from R on.
constexpr finding within(std::int64_t most) {
  constexpr sizes bytes{.activation = 100, .message = 1, .input = 3};
  plan const made = expand(one_f_one_b_recompute.at_most_bytes_in_flight(most, bytes), {.ranks = 4, .micro_batches = 8});
  return check(made);
}
static_assert(!within(109));
static_assert(within(108).broken == law::bytes && within(108).rank == 0 && within(108).number == 109);

// An R belongs between the F and the B of its chunk, once.
constexpr finding of_rank(auto... actions) {
  std::array const list{actions...};
  int const begin[] = {0, static_cast<int>(list.size())};
  plan const made = plan_of_actions(list.data(), begin, 1);
  return check(made);
}
using namespace chevron::letters;
static_assert(!of_rank(F(0, 0), R(0, 0), B(0, 0)) && !of_rank(F(0, 0), R(0, 0), I(0, 0), W(0, 0)));
TEST_CASE("an R elsewhere is refused in words") {
  auto const words = [](finding const& f) { return describe(f).str(); };
  CHECK(words(of_rank(R(0, 0), F(0, 0), B(0, 0))) == "rank 0, step 0: 0R0 comes before 0F0, which it needs");
  CHECK(words(of_rank(F(0, 0), B(0, 0), R(0, 0))) == "rank 0, step 1: 0B0 comes before 0R0, which it needs");
  CHECK(words(of_rank(F(0, 0), I(0, 0), R(0, 0), W(0, 0))) == "rank 0, step 1: 0I0 comes before 0R0, which it needs");
  CHECK(words(of_rank(F(0, 0), R(0, 0), R(0, 0), B(0, 0))) == "rank 0, step 2: 0R0 was already done at step 1");
  CHECK(words(of_rank(F(0, 0), R(0, 0))) == "rank 0: 0B0 is missing: every F is followed by its B, or by its I and its W");
  CHECK(words(of_rank(R(0, 0), B(0, 0))) == "rank 0: 0F0 is missing: every stage runs every microbatch forward");
}
