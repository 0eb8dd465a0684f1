#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/lower/lowered.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/train/evaluator.hpp>

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

constexpr chevron::shape size{.ranks = 2, .micro_batches = 3};
constexpr auto constant_plan = chevron::checked<chevron::catalogue::zb_v, size>;
constexpr auto constant_program = chevron::lowered<chevron::catalogue::zb_v, size>;

/// The same on threads and over Gloo.
void on_both(std::function<void(transport&)> const& rank) {
  chevron::run_threads({.pipeline_ranks = size.ranks}, rank);
  gloo_ranks::check_all_well(gloo_ranks::on_ranks(size.ranks, 1, gloo_ranks::all_share, rank));
}

}  // namespace

TEST_CASE("an evaluator makes its program itself, from a constant or a value, in as many microbatches as it is told") {
  auto const data = make_batch(7, 5);
  reference whole(constant_plan.view().stages);
  auto const expected = whole.forward(data.input)[0];
  double const loss = mean_square(expected, data.target).item<double>();
  complaints wrong;
  std::atomic<int> ranks = 0;
  on_both([&](transport& comm) {
    chevron::trainer train(
        {.program = constant_program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd});
    chevron::evaluator own(train), whole_batch(train, 1);
    chevron::evaluator given(chevron::lower(chevron::prove(chevron::forward_part(constant_program))), train);
    for (auto* each : {&own, &whole_batch, &given}) {
      wrong.require(std::abs(each->loss({data.input}, {data.target}) - loss) < 1e-6, "loss");
      auto const outputs = each->outputs({data.input});
      wrong.require(outputs.empty() == (comm.topology().pipeline_rank() == 1), "outputs where the last stage is");
      if (!outputs.empty()) wrong.require(at::allclose(outputs[0], expected), "outputs");
    }
    wrong.require(own.loss({data.input}, {data.target}) == given.loss({data.input}, {data.target}), "the same program");
    ++ranks;
  });
  CHECK(ranks == 4);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("outputs of microbatches that the caller has cut are those of each, one after the other") {
  auto const data = make_batch(7, 5);
  reference whole(constant_plan.view().stages);
  std::vector<chevron::batch> cut;
  tensors expected;
  for (auto const& part : data.input.split_with_sizes({1, 2, 4})) {
    cut.push_back({{part}, {}});
    expected.push_back(whole.forward(part)[0]);
  }
  complaints wrong;
  std::atomic<int> with_outputs = 0;
  on_both([&](transport& comm) {
    chevron::evaluator evaluate({.program = constant_program, .transport = comm, .stages = build_stage});
    auto const outputs = evaluate.outputs(cut);
    if (outputs.empty()) return;
    wrong.require(at::equal(outputs[0], at::cat(expected)), "outputs");
    ++with_outputs;
  });
  CHECK(with_outputs == 2);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = size.ranks},
                           [&](transport& comm) {
                             chevron::evaluator({.program = constant_program, .transport = comm, .stages = build_stage})
                                 .outputs(std::vector(2, cut[0]));
                           }),
      doctest::Contains("the program runs 3 microbatches a step, 2 were given"), chevron::usage_error);
}

TEST_CASE("more microbatches than the trainer's program has need a program of their own") {
  for (int const micro_batches : {-1, 4}) {
    CHECK_THROWS_WITH_AS(
        chevron::run_threads(
            {.pipeline_ranks = 2},
            [&](transport& comm) {
              chevron::trainer train(
                  {.program = constant_program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd});
              chevron::evaluator const refused(train, micro_batches);
            }),
        doctest::Contains("but the trainer's program has 3: give a number from 1 to 3"), chevron::usage_error);
  }
}
