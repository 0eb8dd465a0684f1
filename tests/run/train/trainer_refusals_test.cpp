// Calls that would train on wrong numbers without an error: refused, with the remedy, and training may go on.
#include <cmath>
#include <limits>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/run.hpp>

#include <doctest/doctest.h>

namespace nn = torch::nn;

namespace {

at::Tensor ones() { return at::ones({8, 4}); }

/// Calls `body` on two ranks, each with a trainer and its stage's module.
template <class Body>
void on_two_ranks(Body const& body) {
  auto const plan = chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4}));
  auto const program = chevron::lower(plan);
  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    nn::Sequential mine;
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = [&](int s) -> chevron::stage {
                                at::manual_seed(s);
                                mine = nn::Sequential(nn::Linear(4, 4));
                                return mine;
                              },
                              .loss = [](at::Tensor out, at::Tensor target) { return at::mse_loss(out, target); },
                              .optimizer = chevron::optimizer<torch::optim::SGD>(0.1)});
    body(trainer, *mine);
  });
}

}  // namespace

TEST_CASE("a total by which shares would be zero, negative or NaN is refused before the step") {
  on_two_ranks([](chevron::trainer& trainer, nn::Module& module) {
    at::Tensor const before = module.parameters()[0].detach().clone();
    for (double const total : {-8.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
      CHECK_THROWS_WITH_AS(trainer.step(ones(), ones(), total), doctest::Contains("the step's total is "), chevron::usage_error);
      chevron::step_total const of_loss(8, {{"balance", total}});
      CHECK_THROWS_WITH_AS(trainer.step(ones(), ones(), of_loss), doctest::Contains("the step's total of loss `balance` is "),
                           chevron::usage_error);
    }
    CHECK_THROWS_WITH_AS(trainer.accumulate(ones(), ones(), std::numeric_limits<double>::infinity()),
                         doctest::Contains("the step's total is inf, and every microbatch is weighed"), chevron::usage_error);
    CHECK(at::equal(module.parameters()[0], before));
    trainer.step(ones(), ones(), 8);
    CHECK_FALSE(at::equal(module.parameters()[0], before));
  });
}

TEST_CASE("a parameter that is converted after the trainer was made is refused") {
  on_two_ranks([](chevron::trainer& trainer, nn::Module& module) {
    trainer.step(ones(), ones());
    module.to(at::kDouble);
    std::string const of_stage = "stage " + std::to_string(trainer.comm().topology().global_rank);
    CHECK_THROWS_WITH_AS(
        trainer.step(ones().to(at::kDouble), ones().to(at::kDouble)),
        doctest::Contains((of_stage + "'s 0.weight is Double of shape [4, 4] on cpu, and was Float of shape [4, 4] "
                                      "on cpu when the trainer was made")
                              .c_str()),
        chevron::usage_error);
    module.to(at::kFloat);
    trainer.step(ones(), ones());
    module.parameters()[1].set_data(at::ones({1}));
    CHECK_THROWS_WITH_AS(trainer.step(ones(), ones()), doctest::Contains("0.bias is Float of shape [1] on cpu"),
                         chevron::usage_error);
  });
}
