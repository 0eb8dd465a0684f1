#pragma once

// A small training job on any transport, beside the same job on threads: every schedule, batches that leave a remainder,
// replicas.

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/run.hpp>

#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

namespace transport_contract {

inline constexpr int width = 6;

inline chevron::stage build_stage(int number) {
  at::manual_seed(100 + number);
  return torch::nn::Sequential(torch::nn::Linear(width, width),
                               torch::nn::Functional([](at::Tensor const& x) { return x.tanh().mul(2); }));
}

inline at::Tensor mean_square(at::Tensor output, at::Tensor target) { return at::mse_loss(output, target); }

inline std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.05));
}

/// The trainer of this model.
inline chevron::trainer trainer_of(chevron::proved_program const& program, chevron::transport& comm) {
  return chevron::trainer({.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
}

struct trained {
  std::vector<double> losses;                       // by step
  std::vector<std::vector<at::Tensor>> parameters;  // by stage of replica 0, at the end
};

/// Four steps with two batch sizes, so that shapes change for good in between.
inline void train_on(chevron::transport& comm, chevron::proved_program const& program, trained& out, std::mutex& mutex) {
  chevron::trainer train = trainer_of(program, comm);
  at::Tensor const all = at::arange(40 * width, at::kFloat).view({40, width}).sin();
  for (int step = 0; step < 4; ++step) {
    int const samples = step < 2 ? 7 : 5;  // 7 leaves a remainder
    int const from = 10 * comm.topology().replica() + step;
    auto const report = train.step({all.narrow(0, from, samples)}, {all.narrow(0, from + 20 - step, samples).cos()});
    std::lock_guard const hold(mutex);
    if (comm.topology().global_rank == 0) out.losses.push_back(report.loss);
  }
  if (comm.topology().replica() != 0) return;
  std::lock_guard const hold(mutex);
  out.parameters.resize(static_cast<std::size_t>(program.view().plan.stages));
  std::size_t i = 0;
  for (int s = 0; s < program.view().plan.stages; ++s) {
    if (program.view().plan.rank_of_stage(s) != comm.topology().pipeline_rank()) continue;
    for (auto& p : train.stages()[static_cast<std::size_t>(s)].parameters())
      out.parameters[static_cast<std::size_t>(s)].push_back(p.value.detach().clone());
    ++i;
  }
  CHECK(i > 0);
}

/// The message with which each rank ended: empty if all went well.
template <class Rank>
std::vector<std::string> on_ranks(int pipeline_ranks, int replicas, Rank const& rank) {
  return thread_ranks::said(thread_ranks::run(pipeline_ranks, replicas, rank));
}

/// \param run run(pipeline_ranks, replicas, body) calls body(transport) on each rank
template <class Run>
void compare(Run const& run) {
  struct size {
    int ranks, replicas, micro_batches;
  };
  std::vector<char const*> schedules;
  chevron::catalogue::for_each([&](auto const& one) { schedules.push_back(one.name); });
  for (char const* const name : schedules) {
    for (auto const& [ranks, replicas, micro_batches] : {size{2, 2, 3}, size{4, 1, 5}, size{2, 1, 1}}) {
      INFO(name << " on " << ranks << " × " << replicas << " ranks, " << micro_batches << " microbatches");
      auto const program =
          chevron::lower(chevron::prove(chevron::catalogue::make_plan(name, {.ranks = ranks, .micro_batches = micro_batches})));
      std::mutex mutex;
      trained by_threads, by_other;
      chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas},
                           [&](chevron::transport& comm) { train_on(comm, program, by_threads, mutex); });
      run(ranks, replicas, [&](chevron::transport& comm) { train_on(comm, program, by_other, mutex); });
      REQUIRE(by_threads.losses.size() == 4);
      CHECK(by_other.losses == by_threads.losses);
      REQUIRE(by_other.parameters.size() == by_threads.parameters.size());
      for (std::size_t s = 0; s < by_threads.parameters.size(); ++s) {
        REQUIRE(by_threads.parameters[s].size() == 2);
        REQUIRE(by_other.parameters[s].size() == 2);
        for (std::size_t i = 0; i < 2; ++i) CHECK(at::equal(by_other.parameters[s][i], by_threads.parameters[s][i]));
      }
    }
  }
}

}  // namespace transport_contract
