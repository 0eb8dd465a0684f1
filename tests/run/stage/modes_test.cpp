// Modules train in the modes that the user set, which evaluation restores; modules that a stage cannot know are refused.
#include "support/gloo_ranks.hpp"
#include "support/thread_ranks.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/run.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

namespace nn = torch::nn;
using chevron::transport;

namespace {

constexpr int width = 6, micro_batches = 2;
auto const sgd = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));

at::Tensor mean_square(at::Tensor output, at::Tensor target) { return at::mse_loss(output, target); }
at::Tensor samples() { return at::arange(8 * width, at::kFloat).view({8, width}).sin(); }

/// Runs `body` on two ranks, by threads, Gloo and streams in turn.
void on_each_transport(std::function<void(transport&)> const& body) {
  using namespace std::chrono_literals;
  chevron::run_threads({.pipeline_ranks = 2}, body);
  gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, 1, gloo_ranks::all_share, body));
  auto const thrown = thread_ranks::said(thread_ranks::run(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    chevron::stream_transport<chevron::host_streams> comm(where, store, watch, 60s);
    comm.deadline(60s);
    body(comm);
    comm.close();
  }));
  for (auto const& each : thrown) CHECK(each == "");
}

/// The arguments of a trainer of this plan.
chevron::trainer_setup setup(chevron::plan const& plan, transport& comm, std::function<chevron::stage(int)> const& build) {
  return {
      .program = chevron::lower(chevron::prove(plan)), .transport = comm, .stages = build, .loss = mean_square, .optimizer = sgd};
}

/// The error of `build`, trained for a step and evaluated, on two ranks in threads.
std::string refused(std::function<chevron::stage(int)> const& build) {
  try {
    auto const plan = chevron::catalogue::make_plan("ZB-H1", {.ranks = 2, .micro_batches = micro_batches});
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(setup(plan, comm, build));
      chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
      train.step({samples()}, {samples()});
      evaluate.loss({samples()}, {samples()});
    });
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "";
}

chevron::stage linear() { return nn::Sequential(nn::Linear(width, width)); }

}  // namespace

TEST_CASE("a module in evaluation stays there through training, and evaluation gives each its mode back") {
  auto const plan = chevron::catalogue::make_plan("ZB-H1", {.ranks = 2, .micro_batches = micro_batches});
  on_each_transport([&](transport& comm) {
    at::set_num_threads(1);
    nn::Sequential frozen(nn::Linear(width, width), nn::BatchNorm1d(width), nn::Dropout(0.5));
    nn::Sequential mixed(nn::Linear(width, width), nn::BatchNorm1d(width), nn::BatchNorm1d(width));
    frozen->eval();
    mixed[1]->eval();
    auto const build = [&](int s) -> chevron::stage { return s == 0 ? chevron::stage(frozen) : chevron::stage(mixed); };
    chevron::trainer train(setup(plan, comm, build));
    chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
    auto const check = [&] {
      if (comm.topology().global_rank == 0) {
        for (auto const& each : frozen->modules()) CHECK(!each->is_training());
        CHECK(at::equal(frozen[1]->as<nn::BatchNorm1d>()->running_mean, at::zeros({width})));
      } else {
        CHECK(mixed->is_training());
        CHECK(mixed[0]->is_training());
        CHECK(!mixed[1]->is_training());
        CHECK(mixed[2]->is_training());
        CHECK(at::equal(mixed[1]->as<nn::BatchNorm1d>()->running_mean, at::zeros({width})));
      }
    };
    check();
    train.step({samples()}, {samples()});
    check();
    auto const mean = mixed[2]->as<nn::BatchNorm1d>()->running_mean;
    auto const before = mean.clone();
    bool const trained = before.abs().sum().item<float>() > 0;
    CHECK(trained == (comm.topology().global_rank == 1));
    evaluate.loss({samples()}, {samples()});
    evaluate.outputs({samples()});
    check();
    CHECK(at::equal(mean, before));
    // The user's word counts at any time.
    if (comm.topology().global_rank == 1) mixed->train();
    train.step({samples()}, {samples()});
    if (comm.topology().global_rank == 1) {
      CHECK(mixed[1]->is_training());
      CHECK(mixed[1]->as<nn::BatchNorm1d>()->running_mean.abs().sum().item<float>() > 0);
    }
  });
}

TEST_CASE("modules are themselves again after an evaluation that failed") {
  auto const plan = chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = micro_batches});
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    nn::Sequential only(nn::Linear(width, width), nn::Dropout(0.5));
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                            .transport = comm,
                            .stages = [&](int) -> chevron::stage { return only; },
                            .loss = mean_square,
                            .optimizer = sgd});
    chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
    CHECK_THROWS(evaluate.loss({at::ones({8, width + 1})}, {samples()}));
    for (auto const& each : only->modules()) CHECK(each->is_training());
  });
}

TEST_CASE("a stage of a module and a callable has the module's parameters, buffers and mode: the same as the module alone") {
  auto const plan = chevron::catalogue::make_plan("ZB-H1", {.ranks = 2, .micro_batches = micro_batches});
  on_each_transport([&](transport& comm) {
    at::set_num_threads(1);
    std::vector<double> said[3];
    std::vector<std::string> names[3];
    for (int const how : {0, 1, 2}) {
      auto const build = [&](int s) -> chevron::stage {
        at::manual_seed(5 + s);
        nn::Sequential layers(nn::Linear(width, width), nn::BatchNorm1d(width), nn::Dropout(0.5));
        if (how == 0) return layers;
        if (how == 1) return {layers, [layers](at::Tensor x) mutable { return layers->forward(x); }};
        return {layers, [layers](std::span<at::Tensor const> all) mutable { return layers->forward(all[0]); }};
      };
      chevron::trainer train(setup(plan, comm, build));
      chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
      for (int step = 0; step < 3; ++step) {
        said[how].push_back(train.step({samples()}, {samples().cos()}).loss);
        said[how].push_back(evaluate.loss({samples()}, {samples().cos()}));
      }
      for (auto& s : train.stages()) {
        for (auto const* list : {&s.parameters(), &s.buffers()}) {
          for (auto const& p : *list) names[how].push_back(p.name);
        }
      }
    }
    for (int const how : {1, 2}) {
      CHECK(said[how] == said[0]);
      CHECK(names[how] == names[0]);
    }
    CHECK(names[0].size() == 7);
  });
}

TEST_CASE("a callable over several modules, which one module holds") {
  nn::Linear first(width, width), second(width, width);
  nn::ModuleDict both(
      std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"first", first.ptr()}, {"second", second.ptr()}});
  chevron::stage const made(both, [first, second](at::Tensor x) mutable { return second(first(x)); });
  REQUIRE(made.parameters().size() == 4);
  CHECK(made.parameters()[0].name == "first.weight");
  CHECK(made.parameters()[3].name == "second.bias");
}

TEST_CASE("a module whose forward takes all tensors as a span") {
  struct every : nn::Module {
    at::Tensor forward(std::span<at::Tensor const> all) { return all[0] * static_cast<double>(all.size()); }
  };
  chevron::stage made = std::make_shared<every>();
  chevron::tensors inputs(9, at::ones({2})), outputs;
  made.forward(inputs, outputs);
  REQUIRE(outputs.size() == 1);
  CHECK(at::equal(outputs[0], at::full({2}, 9.0F)));
}

TEST_CASE("a callable that runs a module which its stage was not given is refused, where that can be seen") {
  auto const of_parameters = [](auto const& module) {
    std::vector<chevron::parameter> out;
    for (auto const& p : module->named_parameters()) out.push_back({p.key(), p.value()});
    return out;
  };
  std::string const norm = refused([&](int s) -> chevron::stage {
    if (s == 0) return linear();
    nn::Sequential hidden(nn::Linear(width, width), nn::BatchNorm1d(width));
    return {[hidden](at::Tensor x) mutable { return hidden->forward(x); }, of_parameters(hidden)};
  });
  INFO(norm);
  CHECK(norm.find("rank 1, step 0, 1F0: stage 1 threw: the stage changes running statistics that are none of its buffers") == 0);
  CHECK(norm.find("Remedy: chevron::stage(module, callable)") != std::string::npos);

  std::string const inside = refused([&](int s) -> chevron::stage {
    if (s == 0) return linear();
    nn::BatchNorm1d hidden(width);
    return nn::Sequential(nn::Linear(width, width), nn::Functional([hidden](at::Tensor x) mutable { return hidden(x); }));
  });
  CHECK(inside.find("the stage changes running statistics that are none of its buffers") != std::string::npos);

  std::string const dropout = refused([&](int s) -> chevron::stage {
    if (s == 0) return linear();
    nn::Sequential hidden(nn::Linear(width, width), nn::Dropout(0.5));
    return {[hidden](at::Tensor x) mutable { return hidden->forward(x); }, of_parameters(hidden)};
  });
  INFO(dropout);
  CHECK(dropout.find("1F0: stage 1 threw: the stage drops units in evaluation") != std::string::npos);
}

TEST_CASE("sparse gradients are refused") {
  std::string const said = refused([&](int s) -> chevron::stage {
    if (s == 1) return linear();
    nn::Embedding table(nn::EmbeddingOptions(10, width).sparse(true));
    return {table, [table](at::Tensor x) mutable { return table(x.abs().to(at::kLong)).sum(1); }};
  });
  INFO(said);
  CHECK(said.find("0F0: stage 0 threw: the stage asks for sparse gradients") != std::string::npos);
  CHECK(said.find("Remedy: sparse(false)") != std::string::npos);
}

TEST_CASE("what is trained is settled when the trainer is made: freezing later is refused, not half done") {
  auto const plan = chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = micro_batches});
  for (bool const frozen_before : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      nn::Sequential only(nn::Linear(width, width), nn::Linear(width, width));
      at::Tensor const weight = only->parameters()[0];
      weight.set_requires_grad(!frozen_before);
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = [&](int) -> chevron::stage { return only; },
                              .loss = mean_square,
                              .optimizer = sgd});
      train.step({samples()}, {samples()});
      weight.set_requires_grad(frozen_before);
      CHECK_THROWS_WITH_AS(
          train.step({samples()}, {samples()}),
          doctest::Contains(frozen_before ? "stage 0's 0.weight needs a gradient after" : "stage 0's 0.weight was frozen after"),
          chevron::usage_error);
    });
  }
}
