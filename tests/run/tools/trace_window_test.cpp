// The measured costs of a run predict its step time: stages that sleep, each for times of its own, on ranks that are threads.
// timeout: 90
// serial: it measures time
#include <time.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>
#include "support/retry.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

#include <chevron/tools/profile/trace_window.hpp>

#include <string>
#include <vector>

namespace {

/// Milliseconds of a stage.
struct stage_time {
  double forward, input, weight;
};
stage_time time_of(int stage) { return {4.0 + stage, 6.0 + 0.5 * stage, 5.0}; }

void sleep_for(double milliseconds) {
  timespec const wanted{0, static_cast<long>(milliseconds * 1e6)};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &wanted, nullptr);
}

/// y = x in the time of F, and its gradient in that of I.
struct sleeping_input : torch::autograd::Function<sleeping_input> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, std::int64_t stage) {
    context->saved_data["stage"] = stage;
    sleep_for(time_of(static_cast<int>(stage)).forward);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    sleep_for(time_of(static_cast<int>(context->saved_data["stage"].toInt())).input);
    return {gradients[0], {}};
  }
};
/// The weight itself, and its gradient in the time of W. It is a function of its own: one of input and weight is asked once, in
/// I.
struct sleeping_weight : torch::autograd::Function<sleeping_weight> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor weight, std::int64_t stage) {
    context->saved_data["stage"] = stage;
    return weight.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    sleep_for(time_of(static_cast<int>(context->saved_data["stage"].toInt())).weight);
    return {gradients[0], {}};
  }
};

chevron::stage build(int number) {
  at::Tensor weight = at::ones({1});
  weight.requires_grad_(true);
  auto const place = static_cast<std::int64_t>(number);
  return chevron::stage(
      [weight, place](at::Tensor x) { return sleeping_input::apply(x, place) * sleeping_weight::apply(weight, place); },
      {{"weight", weight}});
}

/// Trains four steps, the first of which is not looked at.
chevron::profile measured(chevron::plan const& plan, int replicas) {
  std::vector<std::string> texts;
  at::Tensor const batch = at::ones({plan.size.micro_batches, 2});
  chevron::run_threads({.pipeline_ranks = plan.size.ranks, .replicas = replicas}, [&](chevron::transport& comm) {
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                            .transport = comm,
                            .stages = build,
                            .loss = [](at::Tensor const& y, at::Tensor const&) { return y.mean(); },
                            .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1))});
    chevron::trace_window records;
    for (int step = 0; step < 4; ++step) {
      double const seconds = train.step({batch}, {batch}).seconds;
      if (step > 0) records.keep(train.last_trace(), seconds);
    }
    auto const all = comm.all_gather_text(records.text());
    if (comm.topology().global_rank == 0) texts = all;
  });
  return chevron::profile_of(plan, chevron::steps_of(texts));
}

}  // namespace

TEST_CASE("measured costs are the stages' own, and predict the step") {
  for (std::string const name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = small_model::plan_of(name.c_str(), 3, 6);
    int const replicas = name == "ZB-H1" ? 2 : 1;
    // Where others use the machine, ranks are woken late, and a step takes longer than anybody can predict.
    retry::until_well([&](retry::complaints& wrong, int) {
      auto const profile = measured(plan, replicas);
      CAPTURE(name);
      CHECK(profile.replicas == replicas);
      CHECK(profile.steps == 3);
      bool const split = name != "1F1B";
      for (int s = 0; s < profile.stages; ++s) {
        auto const i = static_cast<std::size_t>(s);
        stage_time const time = time_of(s);
        auto const near = [&](double got, double wanted, std::string const& what) {
          CHECK(got >= wanted);  // a sleep is never too short
          wrong.unless(got < 1.25 * wanted + 1, what + " of stage " + std::to_string(s) + " takes about " +
                                                    std::to_string(wanted) + " ms: " + std::to_string(got));
        };
        near(profile.forward[i], time.forward, "F");
        double const input = s == 0 ? 0 : time.input;  // stage 0's inputs want no gradient
        if (split) {
          near(profile.backward_input[i], input, "I");
          near(profile.backward_weight[i], time.weight, "W");
          CHECK(profile.backward[i] == chevron::profile::not_measured);
        } else {
          near(profile.backward[i], input + time.weight, "B");
          CHECK(profile.backward_input[i] == chevron::profile::not_measured);
        }
        if (s + 1 == profile.stages) continue;
        bool const crosses = plan.rank_of.data[s] != plan.rank_of.data[s + 1];
        if (crosses) {
          CHECK(profile.communication[i] >= 0);
          wrong.unless(profile.communication[i] < 3,
                       "a message takes less than 3 ms: " + std::to_string(profile.communication[i]));
        } else {
          CHECK(profile.communication[i] == chevron::profile::not_measured);
        }
      }
      auto const costs = chevron::costs_of(profile, chevron::split_stages(plan));
      REQUIRE(costs.problem.empty());
      double const predicted = chevron::makespan(plan, costs.view());
      auto const both = "predicted " + std::to_string(predicted) + " ms, measured " + std::to_string(profile.pipeline) + " ms";
      MESSAGE(name << ": " << both);
      wrong.unless(profile.pipeline > 0.97 * predicted, "not shorter: " + both);
      wrong.unless(profile.pipeline < 1.15 * predicted, "not longer: " + both);
      CHECK(profile.step >= profile.pipeline);
    });
  }
}
