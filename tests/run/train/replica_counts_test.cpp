// Replicas whose batches count differently: step and evaluation divide by the count of all replicas.
#include <cmath>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/run.hpp>

#include "support/contract_subjects.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Each replica's batch: 4 and 9 samples, then 11 and 3.
std::vector<small_model::batch> data_of(int step) {
  return step == 0 ? std::vector{make_batch(4, 1), make_batch(9, 2)} : std::vector{make_batch(11, 3), make_batch(3, 4)};
}

/// The mean loss of these parts over all replicas, added up as an evaluation does: first over a replica's microbatches.
double mean_of(reference& whole, std::vector<small_model::batch> const& replicas, int micro_batches) {
  at::NoGradGuard const off;
  double samples = 0, mean = 0;
  for (auto const& b : replicas) samples += static_cast<double>(b.input.size(0));
  for (auto const& b : replicas) {
    double of_replica = 0;
    for (int m = 0; m < micro_batches; ++m) {
      auto const part = chevron::samples_of(b.input.size(0), micro_batches, m);
      auto const loss =
          mean_square(whole.forward(b.input.narrow(0, part.first, part.count))[0], b.target.narrow(0, part.first, part.count));
      of_replica += loss.item<double>() * (static_cast<double>(part.count) / samples);
    }
    mean += of_replica;
  }
  return mean;
}

}  // namespace

TEST_CASE("replicas of other sizes: steps and evaluations weigh by what all replicas hold, and nobody says how much that is") {
  for (char const* const name : {"1F1B", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 3);
    std::vector<reference> expected;
    std::vector<double> held_out;
    for (int step = 0; step < 2; ++step) {
      expected.emplace_back(plan.stages);
      held_out.push_back(mean_of(expected.back(), data_of(step), 3));
      expected.back().run(plan, data_of(step));
    }
    transport_contract::for_each_transport([&](transport_contract::subject const& over) {
      complaints wrong;
      for (bool const post_validation : {false, true}) {
        for (auto const& each : over.run(2, 2, [&](transport& comm) {
               auto const still = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0));
               chevron::trainer train(
                   small_model::setup(plan, comm, build_stage, {.post_validation = post_validation, .stable_steps = 0}, still));
               chevron::evaluator evaluator(train);
               for (int step = 0; step < 2; ++step) {
                 auto const data = data_of(step)[static_cast<std::size_t>(comm.topology().replica())];
                 auto const& whole = expected[static_cast<std::size_t>(step)];
                 std::string const where = std::string(name) + ", step " + std::to_string(step) + ": ";
                 train.step(data.input, data.target);
                 auto const report = train.synchronize();
                 wrong.require(report.loss == whole.loss, where + "loss");
                 wrong.require(report.grad_norm == whole.grad_norm, where + "norm");
                 wrong.require(report.samples == (step == 0 ? 13 : 14), where + "samples");
                 for (std::size_t s = 0; s < train.stages().size(); ++s) {
                   auto const& ours = train.stages()[s].parameters();
                   for (std::size_t q = 0; q < ours.size(); ++q)
                     wrong.require(at::equal(ours[q].value.grad(), whole.gradients[s][q]), where + ours[q].name);
                 }
                 wrong.require(evaluator.loss(data.input, data.target) == held_out[static_cast<std::size_t>(step)],
                               where + "evaluation");
               }
             }))
          CHECK(each.text == "");
      }
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    });
  }
}

TEST_CASE("a replica whose labels are all ignored has no share; where no replica counts anything, all are told") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = make_batch(6, 5);
  auto const run = [&](double counts) {
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      bool const empty = comm.topology().replica() == 0;
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = build_stage,
                              .loss =
                                  [&](at::Tensor y, at::Tensor t) {
                                    auto const loss = at::mse_loss(y, t);
                                    return empty ? loss / 0 : loss;  // the mean over nothing
                                  },
                              .optimizer = sgd,
                              .options = {.loss_weight = [&](chevron::batch const&) { return empty ? 0.0 : counts; }}});
      chevron::evaluator evaluator(train);
      auto const check = [&](double loss, char const* what) { wrong.require(loss > 0 && std::isfinite(loss), what); };
      if (counts > 0) check(evaluator.loss(data.input, data.target), "evaluation");
      check(train.step(data.input, data.target).loss, "step");
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  };
  run(5);
  CHECK_THROWS_WITH_AS(run(0), doctest::Contains("the microbatches of this step count nothing"), chevron::usage_error);
}

TEST_CASE("a total that the caller gives is checked") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const run = [&](double total) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm));
      auto const data = data_of(0)[static_cast<std::size_t>(comm.topology().replica())];
      train.accumulate(data.input, data.target, 2 * total);
      train.step(data.input, data.target, 2 * total);
    });
  };
  run(13);
  CHECK_THROWS_WITH_AS(run(12), doctest::Contains("the replicas' batches count 8, 18 samples"), chevron::usage_error);
}
