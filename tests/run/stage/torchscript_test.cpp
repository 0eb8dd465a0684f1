// Stages that are TorchScript modules: their parameters are trained, their buffers and modes are looked after.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/trainer.hpp>

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// A block with a buffer that counts, a normalization's way of two modes, and a child of its own.
torch::jit::Module scripted(int number, char const* forward) {
  at::manual_seed(500 + number);
  torch::jit::Module child("Child");
  child.register_parameter("b", at::randn({width}).set_requires_grad(true), false);
  child.register_attribute("training", c10::BoolType::get(), true);
  child.define("def forward(self, x):\n  return torch.dropout(x + self.b, 0.5, self.training)\n");
  torch::jit::Module made("Block");
  made.register_parameter("w", (at::randn({width, width}) * 0.4).set_requires_grad(true), false);
  made.register_buffer("mean", at::zeros({width}));
  made.register_attribute("training", c10::BoolType::get(), true);
  made.register_module("child", child);
  made.define(forward);
  return made;
}

char const* const whole =
    "def forward(self, x):\n"
    "  if self.training:\n"
    "    self.mean.mul_(0.5).add_(x.detach().mean(0))\n"
    "  return torch.tanh(self.child.forward(torch.matmul(x, self.w)) - self.mean.clone())\n";

}  // namespace

TEST_CASE("a TorchScript module trains under every schedule as in one piece, buffers included") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const data = make_batch(8, 3);
    auto const build = [](int s) { return chevron::stage(scripted(s, whole)); };
    reference model(plan.stages, build);
    REQUIRE(model.stages[0].parameters().size() == 2);
    CHECK(model.stages[0].parameters()[1].name == "child.b");
    model.run(plan, {data});
    complaints wrong;
    auto const rank = [&](transport& comm) { compare_one_step(comm, plan, data, model, wrong, build); };
    chevron::run_threads({.pipeline_ranks = 2}, rank);
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, 1, gloo_ranks::all_share, rank));
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build));
      train.step({data.input}, {data.target});
      for (std::size_t s = 0; s < train.stages().size(); ++s) {
        if (!train.stages()[s]) continue;
        auto const &mine = train.stages()[s].buffers(), &other = model.stages[s].buffers();
        wrong.require(mine.size() == 1 && mine[0].name == "mean" && at::equal(mine[0].value, other[0].value), "buffer");
      }
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("evaluation puts a TorchScript module into evaluation, and each of its modules back into its mode") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  std::vector<torch::jit::Module> all{scripted(0, whole), scripted(1, whole)};
  all[1].attr("child").toModule().train(false);
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    auto const build = [&](int s) { return chevron::stage(all[static_cast<std::size_t>(s)]); };
    chevron::trainer train(small_model::setup(program, comm, build));
    chevron::evaluator evaluate(train);
    auto const data = make_batch(4, 1);
    double const first = evaluate.loss({data.input}, {data.target});
    wrong.require(evaluate.loss({data.input}, {data.target}) == first, "dropout in evaluation");
    for (auto const& p : all[static_cast<std::size_t>(comm.topology().global_rank)].buffers())
      wrong.require(p.abs().sum().item<double>() == 0, "a mean that an evaluation changed");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(all[0].is_training());
  CHECK(all[0].attr("child").toModule().is_training());
  CHECK(all[1].is_training());
  CHECK_FALSE(all[1].attr("child").toModule().is_training());
}

TEST_CASE("a TorchScript module takes None, gives tuples, and stands in a stage with a callable") {
  at::Tensor const x = at::randn({2, width});
  chevron::stage both = scripted(0,
                                 "def forward(self, x, y: Optional[Tensor]):\n"
                                 "  if y is None:\n"
                                 "    return (x * 2, [x, self.w], None)\n"
                                 "  return (x, [y], None)\n");
  tensors given{x, at::Tensor()}, out;
  both.forward(given, out);
  REQUIRE(out.size() == 4);
  CHECK(at::equal(out[0], x * 2));
  CHECK(at::equal(out[2], both.parameters()[0].value));
  CHECK_FALSE(out[3].defined());

  auto module = scripted(1, whole);
  chevron::stage called(module, [module](at::Tensor a, at::Tensor) mutable { return module.forward({a}).toTensor(); });
  CHECK(called.parameters().size() == 2);
  CHECK(called.buffers().size() == 1);

  chevron::stage number = scripted(2, "def forward(self, x):\n  return 3\n");
  given = {x};
  CHECK_THROWS_WITH_AS(
      number.forward(given, out),
      "the module's forward gives a value of TorchScript's type Int: a stage gives tensors, None, or tuples and lists of them",
      chevron::usage_error);
}
