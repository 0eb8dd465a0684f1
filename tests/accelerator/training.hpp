#pragma once

// A training job on the simulated device, over stream_transport, beside the same job on threads in main memory.

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

#include <chevron/transports/streams/stream_transport.hpp>

#include "accelerator/accelerator_streams.hpp"
#include "accelerator/device.hpp"
#include "support/cut_block.hpp"
#include "support/sliced_model.hpp"
#include "support/small_model.hpp"
#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

namespace accelerator {

/// The transport of the ranks: streams with a device each; or threads, with a device each or all on one.
enum class joined { streams, threads, threads_on_one_device };

/// A training job.
struct job {
  char const* schedule = "1F1B";
  int ranks = 2, replicas = 1, micro_batches = 3;
  joined by = joined::streams;
  bool late = false;  // operators run late (late.hpp)
  chevron::stage (*build)(int number) = small_model::build_stage;
  chevron::trainer_options options = {};
  int steps = 3;
  int passes = 1;                                                  // runs of the program for a step
  bool large_batches = false;                                      // every third step's gradients are large
  std::function<void(chevron::trainer&, long step)> between = {};  // after a step
  int slices = 1;
  std::function<chevron::plan()> plan = {};  // in place of the schedule's
  int shards = 1;                            // where there are several, stages are cut over them (support/cut_block.hpp)
  at::Tensor (*loss)(at::Tensor output, at::Tensor target) = small_model::mean_square;

  chevron::topology grid() const { return {.pipeline_ranks = ranks, .replicas = replicas, .shards = shards}; }
};

struct outcome {
  std::vector<double> losses, norms;                // of rank 0, by step
  std::vector<std::vector<at::Tensor>> parameters;  // and buffers, by stage and shard of replica 0, in main memory
  std::vector<fault> faults;
  long operators = 0;
  std::vector<std::string> said;  // by rank: the text of its exception
  int left = 0;                   // blocks of memory
};

/// Its parameters and buffers, from main memory to where it is to be computed.
inline chevron::stage moved(chevron::stage made, at::Device where) {
  at::NoGradGuard const off;
  for (auto const* list : {&made.parameters(), &made.buffers()}) {
    for (chevron::parameter const& p : *list) {
      if (p.value.defined() && p.value.device() != where) p.value.set_data(p.value.to(where));
    }
  }
  return made;
}

inline void train_on(chevron::transport& comm, job const& what, at::Device where, outcome& out, std::mutex& mutex) {
  auto options = what.options;
  options.device = where;
  std::vector<double> losses, norms;
  options.on_report = [&](chevron::step_report const& report) {
    losses.push_back(report.loss);
    norms.push_back(report.grad_norm);
  };
  auto const program = chevron::lower(chevron::prove(
      what.plan ? what.plan()
                : sliced_model::plan_of(what.schedule,
                                        {.ranks = what.ranks, .micro_batches = what.micro_batches, .slices = what.slices})));
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages =
                              [&](int s) {
                                return what.shards > 1 ? build_cut_stage(s, small_model::width, comm, where)
                                                       : moved(what.build(s), where);
                              },
                          .loss = what.loss,
                          .optimizer = small_model::adamw,
                          .options = options});
  for (int step = 0; step < what.steps; ++step) {
    // The last steps have other shapes, and for good.
    int const samples = 2 * what.micro_batches + (step < what.steps - 1 ? 1 : 0);
    auto const data = [&](int pass) {
      int const seed = 100 * comm.topology().replica() + 10 * pass + step;
      auto b = small_model::make_batch(samples, seed);
      if (what.slices > 1) {
        auto const all = sliced_model::make_sequences(samples, 7, seed);
        b = {all.input, all.target};
      }
      if (what.large_batches && step % 3 == 2) b.target.mul_(100);
      // The user computes on a stream of their own.
      if (!where.is_cpu()) b = {b.input.to(where).mul(1), b.target.to(where).mul(1)};
      return b;
    };
    double const all = static_cast<double>(samples) * what.passes * what.replicas;
    for (int pass = 0; pass + 1 < what.passes; ++pass) {
      auto const b = data(pass);
      train.accumulate({b.input}, {b.target}, all);
    }
    auto const b = data(what.passes - 1);
    train.step({{b.input}, {b.target}}, all);
    if (what.between) what.between(train, step);
  }
  train.synchronize();
  std::lock_guard const hold(mutex);
  if (comm.topology().global_rank == 0) out.losses = losses, out.norms = norms;
  if (comm.topology().replica() != 0) return;
  auto const stages = static_cast<std::size_t>(program.view().plan.stages), shards = static_cast<std::size_t>(what.shards);
  out.parameters.resize(stages * shards);
  for (std::size_t s = 0; s < stages; ++s) {
    if (!train.stages()[s]) continue;
    auto& of_stage = out.parameters[s * shards + static_cast<std::size_t>(comm.topology().shard())];
    for (auto const* list : {&train.stages()[s].parameters(), &train.stages()[s].buffers()}) {
      for (auto const& p : *list) of_stage.push_back(p.value.detach().cpu().clone());
    }
  }
}

inline outcome train_in_main_memory(job const& what) {
  outcome out;
  std::mutex mutex;
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas, .shards = what.shards},
                       [&](chevron::transport& comm) { train_on(comm, what, at::kCPU, out, mutex); });
  return out;
}

template <class Streams = accelerator_streams>
void train_over_streams(job const& what, outcome& out, std::mutex& mutex) {
  out.said = thread_ranks::said(
      thread_ranks::run(what.grid(), [&](chevron::topology const& where, auto const& store, auto const& watch) {
        at::Device const mine = device(where.global_rank);
        c10::DeviceGuard const here(mine);
        chevron::stream_transport<Streams> comm(where, store, watch, std::chrono::seconds(60), mine);
        comm.deadline(std::chrono::seconds(30));
        // The user goes on at once, in memory that the transport has let go of.
        at::Tensor const next = at::ones({1}, at::TensorOptions().device(mine));
        train_on(comm, what, mine, out, mutex);
        comm.close();
      }));
}

inline void train_over_threads(job const& what, outcome& out, std::mutex& mutex) {
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas, .shards = what.shards},
                       [&](chevron::transport& comm) {
                         at::Device const mine = device(what.by == joined::threads ? comm.topology().global_rank : 0);
                         c10::DeviceGuard const here(mine);
                         train_on(comm, what, mine, out, mutex);
                       });
}

template <class Streams = accelerator_streams>
outcome train_on_devices(job const& what) {
  outcome out;
  start_over(what.late);
  std::mutex mutex;
  what.by == joined::streams ? train_over_streams<Streams>(what, out, mutex) : train_over_threads(what, out, mutex);
  out.faults = detector::instance().faults();
  out.operators = detector::instance().operators();
  out.left = start_over();
  return out;
}

/// Runs the job on both, and compares bit by bit; norms but for the order in which their squares are added. No fault may be
/// found. \returns how many operators ran on the devices
inline long compare(job const& what, std::string const& words) {
  INFO(words << ": " << std::string(what.schedule) << " on " << what.ranks << " × " << what.replicas << " × " << what.shards
             << " ranks, " << what.micro_batches << " microbatches");
  outcome const wanted = train_in_main_memory(what), got = train_on_devices(what);
  for (auto const& f : got.faults) {
    INFO(f.text);
    CHECK(false);
  }
  for (auto const& said : got.said) CHECK(said == "");
  CHECK(got.left == 0);
  CHECK(got.operators > 0);
  REQUIRE(!got.losses.empty());
  CHECK(got.losses == wanted.losses);
  REQUIRE(got.norms.size() == wanted.norms.size());
  for (std::size_t i = 0; i < got.norms.size(); ++i) CHECK(got.norms[i] == doctest::Approx(wanted.norms[i]).epsilon(1e-12));
  REQUIRE(got.parameters.size() == wanted.parameters.size());
  for (std::size_t s = 0; s < got.parameters.size(); ++s) {
    REQUIRE(got.parameters[s].size() == wanted.parameters[s].size());
    for (std::size_t i = 0; i < got.parameters[s].size(); ++i) CHECK(at::equal(got.parameters[s][i], wanted.parameters[s][i]));
  }
  return got.operators;
}

}  // namespace accelerator
