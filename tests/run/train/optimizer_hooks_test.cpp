#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/train/trainer.hpp>

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"
#include "support/whole_training.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// The same on threads and over Gloo.
void on_both(int ranks, int replicas, std::function<void(transport&)> const& rank) {
  chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, rank);
  gloo_ranks::check_all_well(gloo_ranks::on_ranks(ranks, replicas, gloo_ranks::all_share, rank));
}

/// No weight decay on norms and biases. Not decided by `dim()` alone: in every other stage norms have another rate, too.
std::unique_ptr<torch::optim::Optimizer> by_names(std::vector<chevron::named_parameter> const& all) {
  std::vector<at::Tensor> norms[2], matrices;
  for (auto const& p : all) {
    bool const of_norm = p.name.starts_with("0.") || p.name.ends_with("bias");
    (of_norm ? norms[p.stage % 2] : matrices).push_back(p.value);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  auto const add = [&](std::vector<at::Tensor>& tensors, double rate, double decay) {
    if (tensors.empty()) return;
    groups.emplace_back(std::move(tensors),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(rate).weight_decay(decay)));
  };
  add(matrices, 0.01, 0.3);
  add(norms[0], 0.01, 0);
  add(norms[1], 0.02, 0);
  return std::make_unique<torch::optim::AdamW>(std::move(groups));
}

}  // namespace

TEST_CASE("groups by the names of parameters: every schedule learns as the model in one piece does with the same groups") {
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    CAPTURE(name);
    auto const plan = plan_of(name, 2, 3);
    auto const program = chevron::lower(chevron::prove(plan));
    whole_training const whole(plan, make_batch(7, 5), by_names, 3);
    complaints wrong;
    on_both(2, 1, [&](transport& comm) { whole.compare(comm, program, wrong); });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("a parameter of two stages on one rank is given once, as the first one's; tensors alone and any return type do, too") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZBVZeroBubble", 1, 2)));
  std::vector<std::string> names;
  torch::nn::Linear shared(width, width);
  auto const build = [&](int) { return chevron::stage(shared).tie("weight", "w").tie("bias", "b"); };
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(program, comm, build, {}, [&](std::vector<chevron::named_parameter> const& all) {
      std::vector<at::Tensor> tensors;
      for (auto const& p : all) {
        names.push_back(std::to_string(p.stage) + " " + p.name);
        tensors.push_back(p.value);
      }
      return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(0.1));
    }));
    chevron::trainer old(small_model::setup(program, comm, build_stage, {}, [](std::vector<at::Tensor> all) {
      return std::make_unique<torch::optim::SGD>(std::move(all), torch::optim::SGDOptions(0.1));
    }));
    auto const data = make_batch(4, 1);
    old.step({data.input}, {data.target});
  });
  CHECK(names == std::vector<std::string>{"0 weight", "0 bias"});
}

TEST_CASE("before the optimizer: final gradients on every rank, once a step, and what the report says") {
  auto const plan = plan_of("ZBVZeroBubble", 2, 3);
  auto const program = chevron::lower(chevron::prove(plan));
  std::vector<batch> const data = {make_batch(7, 5), make_batch(7, 6)};
  double const clip = 0.05;
  reference whole(plan.stages);
  whole.run(plan, data);
  double const factor = clip / (whole.grad_norm + 1e-6);
  complaints wrong;
  std::atomic<int> calls = 0;
  on_both(2, 2, [&](transport& comm) {
    chevron::final_gradients seen;
    std::size_t count = 0;
    chevron::trainer train(
        {.program = program,
         .transport = comm,
         .stages = build_stage,
         .loss = mean_square,
         .optimizer = sgd,
         .options = {.clip_grad_norm = clip,
                     .when_not_finite = chevron::not_finite::skip,
                     .before_optimizer_step = [&](chevron::final_gradients const& now) {
                       ++calls;
                       seen = now;
                       count = now.parameters.size();
                       if (now.step > 0) return;
                       for (auto const& p : now.parameters) {
                         auto const& mine = whole.stages[static_cast<std::size_t>(p.stage)].parameters();
                         for (std::size_t q = 0; q < mine.size(); ++q) {
                           if (mine[q].name != p.name) continue;
                           at::Tensor const expected = whole.gradients[static_cast<std::size_t>(p.stage)][q] * factor;
                           wrong.require(at::allclose(p.value.grad(), expected, 1e-6, 1e-9), "gradient of " + p.name);
                           wrong.require(at::equal(p.value, mine[q].value), "not stepped yet");
                         }
                       }
                     }}});
    auto const& mine = data[static_cast<std::size_t>(comm.topology().replica())];
    auto const report = train.step({mine.input}, {mine.target});
    wrong.require(report.clipped && count == 8, "all of this rank's parameters, clipped");
    wrong.require(seen.step == 0 && seen.loss == report.loss && seen.grad_norm == report.grad_norm && seen.learning_rate == 0.1,
                  "as reported");
    train.step({mine.input * std::numeric_limits<float>::infinity()}, {mine.target});
    wrong.require(seen.step == 0, "not called for a step that is skipped");
    train.step({mine.input}, {mine.target});
    wrong.require(seen.step == 2, "called again");
  });
  CHECK(calls == 2 * 4 * 2);  // transports, ranks, steps
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("before the optimizer: what is changed in place is what is stepped with; a rank without parameters is asked, too") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  auto const build = [](int s) -> chevron::stage {
    if (s == 1) return chevron::stage([](at::Tensor x) { return x.tanh(); }, {});
    return build_stage(s);
  };
  std::atomic<int> empty = 0;
  std::vector<at::Tensor> trained[2];
  for (int const way : {0, 1}) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(
          {.program = program,
           .transport = comm,
           .stages = build,
           .loss = mean_square,
           .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(way == 0 ? 0.25 : 0.125)),
           .options = {.before_optimizer_step = [&](chevron::final_gradients const& now) {
             if (now.parameters.empty()) ++empty;
             for (auto const& p : now.parameters) p.value.mutable_grad().mul_(way == 0 ? 1 : 2);
           }}});
      for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
      if (comm.topology().pipeline_rank() != 0) return;
      for (auto& p : train.stages()[0].parameters()) trained[way].push_back(p.value.detach().clone());
    });
  }
  CHECK(empty == 6);
  REQUIRE(trained[0].size() == 4);
  for (std::size_t i = 0; i < trained[0].size(); ++i) CHECK(at::equal(trained[0][i], trained[1][i]));
}

TEST_CASE("before the optimizer: not where steps are done over") {
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = 1},
                           [&](transport& comm) {
                             chevron::trainer(small_model::setup(
                                 plan_of("1F1B", 1, 2), comm, build_stage,
                                 {.before_optimizer_step = [](chevron::final_gradients const&) {}, .post_validation = true}));
                           }),
      doctest::Contains("before_optimizer_step does not go with post_validation"), chevron::usage_error);
}
