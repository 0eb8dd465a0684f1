// The functions and modules that can be a loss.

#include "support/small_model.hpp"

#include <memory>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/loss.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Of two steps.
double first_loss(chevron::loss_function const& loss, at::Tensor const& target, builder const& build = build_stage) {
  double out = 0;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 2))),
                            .transport = comm,
                            .stages = build,
                            .loss = loss,
                            .optimizer = sgd});
    double const got = train.step(make_batch(4, 1).input, target).loss;
    train.step(make_batch(4, 2).input, target);
    if (comm.topology().global_rank == 0) out = got;
  });
  return out;
}

/// A loss with a temperature that it learns.
struct tempered_impl : torch::nn::Module {
  tempered_impl() { temperature = register_parameter("temperature", at::full({}, 2.)); }
  at::Tensor forward(at::Tensor out, at::Tensor target) { return at::mse_loss(out * temperature, target); }
  at::Tensor temperature;
};

}  // namespace

TEST_CASE("a loss module is a loss, by its holder, its pointer or an AnyModule") {
  auto const target = make_batch(4, 1).target;
  double const expected = first_loss([](at::Tensor a, at::Tensor b) { return at::mse_loss(a, b); }, target);
  CHECK(expected > 0);
  CHECK(first_loss(torch::nn::MSELoss(), target) == expected);
  CHECK(first_loss(std::make_shared<torch::nn::MSELossImpl>(), target) == expected);
  CHECK(first_loss(torch::nn::AnyModule(torch::nn::MSELoss()), target) == expected);
  at::Tensor const classes = at::arange(4) % width, weights = at::arange(1, width + 1).to(at::kFloat);
  double const weighted =
      first_loss([&](at::Tensor out, at::Tensor wanted) { return at::cross_entropy_loss(out, wanted, weights); }, classes);
  CHECK(first_loss(torch::nn::CrossEntropyLoss(torch::nn::CrossEntropyLossOptions().weight(weights)), classes) == weighted);
}

TEST_CASE("an AnyModule is a stage") {
  auto const target = make_batch(4, 1).target;
  auto const layer = [](int s) {
    at::manual_seed(s);
    return torch::nn::Linear(width, width);
  };
  double const expected = first_loss(mean_square, target, [&](int s) { return chevron::stage(layer(s)); });
  CHECK(first_loss(mean_square, target, [&](int s) { return chevron::stage(torch::nn::AnyModule(layer(s))); }) == expected);
  CHECK(chevron::stage(torch::nn::AnyModule(layer(0))).parameters().size() == 2);
}

TEST_CASE("a loss module with parameters of its own is refused; one that the last stage registers learns") {
  auto const target = make_batch(4, 1).target;
  CHECK_THROWS_WITH_AS(first_loss(std::make_shared<tempered_impl>(), target),
                       doctest::Contains("stage 1 threw: the stage uses a parameter of sizes [] that it does not list"),
                       chevron::error);
  auto const loss = std::make_shared<tempered_impl>();
  auto const build = [&](int s) -> chevron::stage {
    at::manual_seed(s);
    torch::nn::Linear layer(width, width);
    if (s == 0) return layer;
    auto const both = std::make_shared<torch::nn::Module>();
    both->register_module("layer", layer.ptr());
    both->register_module("loss", loss);
    return {both, [layer](at::Tensor x) mutable { return layer(x); }};
  };
  CHECK(first_loss(loss, target, build) > 0);
  CHECK(loss->temperature.item<double>() != 2);
}
