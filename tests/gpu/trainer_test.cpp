// Training on GPUs: the same executor, transports and laws as on the CPU.
#include "gpus.hpp"
#include "training.hpp"

#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/run/train/fused_optimizers.hpp>

#include <doctest/doctest.h>

using training::compare;
using training::gpu;
using training::outcome;

namespace {

constexpr int samples = 24, steps = 3;

void train_on(chevron::transport& comm, at::Device device, chevron::proved_program const& program, outcome& out,
              chevron::trainer_options options = {}, at::ScalarType dtype = at::kFloat) {
  int const stages = program.view().plan.stages;
  options.clip_grad_norm = 1;
  options.device = device;
  auto const build = [&](int number) {
    chevron::stage out = training::build_stage(number, stages, device);
    for (auto const& p : out.parameters()) p.value.set_data(p.value.to(dtype));
    return out;
  };
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = build,
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer = chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-3)),
                          .options = options});
  at::Tensor const all =
      at::arange(2 * samples * training::width, at::kFloat).view({2 * samples, training::width}).sin().to(dtype);
  for (int step = 0; step < steps; ++step) {
    auto const report = train.step({all.narrow(0, step, samples)}, {all.narrow(0, samples - step, samples).cos()});
    out.add(train, comm);
    out.add(comm, report);
    // Busy times are of the GPU's clock, the longest rank's time is of the host's: 0 only where neither was measured.
    if (report.settled) CHECK(report.bubble > 0);
    CHECK(report.bubble < 1);
  }
  train.synchronize();
  out.add(train, stages);
}

}  // namespace

TEST_CASE("every schedule trains on a GPU as the un-pipelined model does: ranks as threads on one") {
  if (!gpus::at_least(1)) return;
  chevron::catalogue::for_each([&](auto const& one) {
    int const ranks = 2, micro_batches = 6;
    auto const made = chevron::catalogue::make_plan(one.name, {.ranks = ranks, .micro_batches = micro_batches});
    auto const program = chevron::lower(chevron::prove(made));
    outcome pipelined, alone;
    chevron::run_threads({.pipeline_ranks = ranks},
                         [&](chevron::transport& comm) { train_on(comm, gpu(0), program, pipelined); });
    auto const one_rank =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = micro_batches})));
    chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& comm) { train_on(comm, gpu(0), one_rank, alone); });
    compare(pipelined, alone, one.name);
  });
}

TEST_CASE("replicas on one GPU add their gradients") {
  if (!gpus::at_least(1)) return;
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4})));
  outcome on_gpu, on_cpu;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2},
                       [&](chevron::transport& comm) { train_on(comm, gpu(0), program, on_gpu); });
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2},
                       [&](chevron::transport& comm) { train_on(comm, at::kCPU, program, on_cpu); });
  compare(on_gpu, on_cpu, "2 × 2");
}

TEST_CASE("a sharded optimizer, late gathers and float32 masters change no bit of what two replicas train on one GPU") {
  if (!gpus::at_least(1)) return;
  for (char const* const schedule : {"1F1B", "ZBVZeroBubble"}) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = 2, .micro_batches = 4})));
    for (at::ScalarType const dtype : {at::kFloat, at::kBFloat16}) {
      auto const trained = [&](chevron::sharding shard, bool overlap_gather, outcome& out) {
        chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](chevron::transport& comm) {
          train_on(comm, gpu(0), program, out,
                   {.shard = shard, .overlap_gather = overlap_gather, .master_parameters = dtype == at::kBFloat16}, dtype);
        });
      };
      outcome whole;
      trained(chevron::sharding::nothing, false, whole);
      for (chevron::sharding const shard : {chevron::sharding::optimizer, chevron::sharding::gradients}) {
        for (bool const late : {false, true}) {
          CAPTURE(schedule);
          CAPTURE(dtype);
          CAPTURE(late);
          outcome cut;
          trained(shard, late, cut);
          auto const a = cut.all_parameters(), b = whole.all_parameters();
          REQUIRE(a.size() == b.size());
          for (std::size_t i = 0; i < a.size(); ++i) CHECK(at::equal(a[i], b[i]));
          CHECK(cut.losses == whole.losses);
          REQUIRE(cut.norms.size() == whole.norms.size());
          for (std::size_t i = 0; i < cut.norms.size(); ++i) CHECK(cut.norms[i] == doctest::Approx(whole.norms[i]).epsilon(1e-6));
        }
      }
    }
  }
}

TEST_CASE("NCCL between GPUs trains as threads do") {
  if (!gpus::at_least(2)) return;
  for (char const* const name : {"GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(name, {.ranks = 2, .micro_batches = 6})));
    outcome by_nccl, by_threads;
    chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
      at::Device const mine = gpu(comm.topology().global_rank);
      c10::cuda::CUDAGuard const here(mine);
      train_on(comm, mine, program, by_threads);
    });
    training::over_nccl(2, [&](chevron::transport& comm, at::Device mine) { train_on(comm, mine, program, by_nccl); });
    compare(by_nccl, by_threads, name);
  }
}

TEST_CASE("one NCCL rank alone: streams, events and the end of a job") {
  if (!gpus::at_least(1)) return;
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 4})));
  outcome out;
  training::over_nccl(1, [&](chevron::transport& comm, at::Device mine) { train_on(comm, mine, program, out); });
  CHECK(out.losses.size() == steps);
}
