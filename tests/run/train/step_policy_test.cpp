// Whether a step is taken or skipped depends on its loss and norm alone, so that all ranks decide alike.

#include <limits>
#include <string>
#include <vector>

#include <chevron/run/train/step_policy.hpp>

#include <doctest/doctest.h>

namespace {

chevron::error_context const here{.rank = 3, .step = 7, .action = "OPTIMIZER_STEP"};

/// A step of this norm, decided on.
chevron::step_report decided(chevron::detail::step_policy& policy, double norm, std::string const& loss_culprit = "",
                             std::string const& gradient_culprit = "") {
  chevron::step_report report;
  report.loss = 1;
  report.grad_norm = norm;
  policy.decide(report, loss_culprit, gradient_culprit, here);
  return report;
}

}  // namespace

TEST_CASE("a norm above the limit is clipped to it, one below or at it is left alone") {
  chevron::detail::step_policy policy({.clip_grad_norm = 2});
  for (double const norm : {0.0, 1.0, 2.0}) CHECK(!decided(policy, norm).clipped);
  auto const large = decided(policy, 8);
  CHECK(large.clipped);
  CHECK(!large.skipped);
  CHECK(policy.clip_factor(large) * large.grad_norm == doctest::Approx(2));
  chevron::detail::step_policy without({});
  CHECK(!decided(without, 1e30).clipped);
}

TEST_CASE("what is not finite stops every rank with its name, or is skipped where that was asked for") {
  chevron::detail::step_policy stops({});
  CHECK_THROWS_WITH_AS(
      decided(stops, 1, "the loss of microbatch 2", "the gradient of stage 0's weight"),
      doctest::Contains("the loss of microbatch 2 is not finite; no parameter was changed. Remedy: a lower learning rate, "),
      chevron::numerical_error);
  CHECK_THROWS_WITH_AS(decided(stops, 1, "", "the gradient of stage 0's weight"),
                       doctest::Contains("the gradient of stage 0's weight is not finite"), chevron::numerical_error);
  chevron::detail::step_policy skips({.clip_grad_norm = 1, .when_not_finite = chevron::not_finite::skip});
  auto const skipped = decided(skips, 50, "the loss of microbatch 0");
  CHECK(skipped.skipped);
  CHECK(!skipped.clipped);
}

TEST_CASE("an overflow of the gradient backs the loss factor off before it stops anything; one of the loss does not") {
  chevron::detail::step_policy policy(
      {.scaling = chevron::loss_scaling{.initial = 8, .growth_interval = 2, .least = 2, .most = 16}});
  auto const first = decided(policy, 1, "", "the gradient");
  CHECK(first.skipped);
  CHECK(first.loss_factor == 8);  // the one that it was computed with
  CHECK(policy.scaling().factor() == 4);
  CHECK(decided(policy, 1, "", "the gradient").loss_factor == 4);
  CHECK(policy.scaling().factor() == 2);
  CHECK_THROWS_AS(decided(policy, 1, "", "the gradient"), chevron::numerical_error);  // it cannot back off further
  for (int step = 0; step < 2; ++step) decided(policy, 1);
  CHECK(policy.scaling().factor() == 4);
  CHECK_THROWS_AS(decided(policy, 1, "the loss of microbatch 0"), chevron::numerical_error);
}

TEST_CASE("ranks rely on the next step after so many in a row that needed nothing") {
  chevron::detail::step_policy policy({.clip_grad_norm = 2, .when_not_finite = chevron::not_finite::skip, .stable_steps = 3});
  for (int step = 0; step < 3; ++step) {
    CHECK(!policy.is_stable());
    decided(policy, 1);
  }
  CHECK(policy.is_stable());
  decided(policy, 5);
  CHECK(!policy.is_stable());
  for (int step = 0; step < 3; ++step) decided(policy, 1);
  CHECK(policy.is_stable());
  decided(policy, 1, "", "the gradient");
  CHECK(!policy.is_stable());
  CHECK(chevron::detail::step_policy({.stable_steps = 0}).is_stable());
}

TEST_CASE("a rank's own numbers say for certain only what they do whatever the others have") {
  chevron::detail::step_policy const policy({.clip_grad_norm = 5});
  double const infinite = std::numeric_limits<double>::infinity();
  CHECK(!policy.certainly_wrong(std::vector{1.0, 2.0}, std::vector{9.0, 16.0}));  // at the limit
  CHECK(policy.certainly_wrong(std::vector{1.0, 2.0}, std::vector{9.0, 16.1}));
  CHECK(policy.certainly_wrong(std::vector{1.0, infinite}, std::vector{1.0}));
  CHECK(policy.certainly_wrong(std::vector{1.0}, std::vector{std::numeric_limits<double>::quiet_NaN()}));
  chevron::detail::step_policy const without({});
  CHECK(!without.certainly_wrong(std::vector{1e300}, std::vector{1e300}));
}
