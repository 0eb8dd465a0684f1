#include <array>
#include <string>

#include <chevron/schedule.hpp>

#include <doctest/doctest.h>

#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;

namespace {

inline constexpr auto X = own_action<'X'>({.after = {W, B}, .every = true});
inline constexpr auto Y = own_action<'Y'>({.before = {F}});
inline constexpr auto averaged =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank)) | steady(F, I, W, X) | cooldown(I, W, X)).named("averaged");
inline constexpr auto fetched = schedule(placement::vee, warmup(Y(0), F(0), Y(1), F(1)) | cooldown(B(1), B(0)));

std::string verdict_on(auto const& schedule, shape size) {
  plan const made = expand(schedule, size);
  return describe(check(made)).str();
}

}  // namespace

// Described, proved, lowered and timed like the other letters.
constexpr auto small = checked<averaged, shape{.ranks = 2, .micro_batches = 3}>;
static_assert(reads(small, 0, "0F0 0F1 0I0 0W0 0X0 0F2 0I1 0W1 0X1 0I2 0W2 0X2"));
static_assert(makespan(small, costs{.own = {2}}) == makespan(small, costs{}) + 3 * 2);
constexpr auto lowered_small = lowered<averaged, shape{.ranks = 2, .micro_batches = 3}>;
static_assert(!check(lowered_small.view()));
static_assert(reads(checked<fetched, shape{.ranks = 1, .micro_batches = 2}>, 0,
                    "0Y0 0F0 1Y0 1F0 0Y1 0F1 1Y1 1F1 1B0 0B0 1B1 0B1"));

TEST_CASE("an own action that leaves its place is refused in words") {
  shape const size{.ranks = 2, .micro_batches = 2};
  auto const with = [&](auto const& phases) { return verdict_on(schedule(placement::linear, phases), size); };
  CHECK(with(warmup(F * (ranks - 1 - rank)) | steady(F, I, X, W) | cooldown(I, X, W)) ==
        "rank 0, step 3: 0X0 comes before 0W0, which it needs");
  CHECK(with(warmup(F, Y) | cooldown(B, X)) == "rank 0, step 0: 0F0 comes before 0Y0, which it needs");
  CHECK(with(warmup(F) | cooldown(B, X * (1 - rank))) ==
        "rank 1: 1X0 is missing: its declaration requires one for each stage and microbatch");
  CHECK(with(warmup(F) | cooldown(B, X)) == "all laws hold");
}

TEST_CASE("a plan takes own actions that it declares, once each") {
  auto const says = [](bool declared, auto... actions) {
    std::array const list{actions...};
    int const begin[] = {0, static_cast<int>(list.size())};
    plan made = plan_of_actions(list.data(), begin, 1);
    made.own[0].declared = declared;
    return describe(check(made)).str();
  };
  action const x = make_action(kind::own_x, 0, 0);
  CHECK(says(true, x, F(0, 0), B(0, 0)) == "all laws hold");
  CHECK(says(true, x, F(0, 0), B(0, 0), x) == "rank 0, step 3: 0X0 was already done at step 0");
  CHECK(says(false, x, F(0, 0), B(0, 0)) ==
        "rank 0, step 0: 0X0 is of a kind that the plan does not declare. Remedy: own_action in the description, or "
        "plan::own[k].declared, here with k = 0");
}
