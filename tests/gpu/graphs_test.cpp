// Computations launched as CUDA graphs: the same as kernel by kernel.
#include "gpus.hpp"
#include "training.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <tuple>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/nn/modules/dropout.h>
#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/transports/gpu/cuda_graph.hpp>

#include <doctest/doctest.h>

using training::build_stage;
using training::compare;
using training::gpu;
using training::outcome;
using training::width;

namespace {

constexpr int steps = 8;

using builder = std::function<chevron::stage(int number, int stages, at::Device device)>;

void train_on(chevron::transport& comm, at::Device device, chevron::proved_program const& program, bool graphs, outcome& out,
              chevron::trainer_options options = {}, builder const& build = build_stage) {
  constexpr int rows = 24;
  int const stages = program.view().plan.stages;
  options.device = device;
  options.learning_rate = [](long step) { return 1e-3 / static_cast<double>(step + 1); };
  options.on_report = [&](chevron::step_report const& report) { out.add(comm, report); };
  if (graphs) options.graphs = chevron::cuda_graphs();
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = [&](int s) { return build(s, stages, device); },
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
                          .options = options});
  at::Tensor all = at::arange(3 * rows * width, at::kFloat).view({3 * rows, width}).sin();
  if (program.view().plan.size.slices > 1) all = (all.unsqueeze(1) + at::arange(4, at::kFloat).view({1, 4, 1})).sin();
  for (int step = 0; step < steps; ++step) {
    int const now = step == 5 ? rows - 6 : rows;  // one batch of another size
    train.step({all.narrow(0, step, now)}, {all.narrow(0, rows - step, now).cos()});
    out.add(train, comm);
  }
  train.synchronize();
  out.add(train, stages);
}

/// Steps 0, 1, 2 come before the capture, and batch 5 has another size.
void check_launched(outcome const& got, std::string const& what) {
  for (auto const& of_rank : got.why_not) {
    REQUIRE(of_rank.size() == steps);
    for (std::size_t s = 0; s < of_rank.size(); ++s) {
      INFO(what << ", step " << s << ": " << of_rank[s]);
      CHECK(of_rank[s].empty() == (s > 2 && s != 5));
    }
  }
}

}  // namespace

TEST_CASE("every schedule, launched as graphs, trains as it does kernel by kernel: ranks as threads on one GPU") {
  if (!gpus::at_least(1)) return;
  chevron::catalogue::for_each([&](auto const& one) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(one.name, {.ranks = 2, .micro_batches = 6})));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
        train_on(comm, gpu(0), program, graphs, graphs ? with : without, {.clip_grad_norm = 1});
      });
    }
    compare(with, without, one.name);
    check_launched(with, one.name);
  });
}

TEST_CASE("graphs with replicas, recomputation, half precision, steps that are taken back") {
  if (!gpus::at_least(1)) return;
  auto const recomputing = [](int number, int stages, at::Device device) {
    chevron::stage made = build_stage(number, stages, device);
    made.recompute();
    return made;
  };
  struct variant {
    char const *name, *schedule;
    int replicas;
    chevron::trainer_options options;
    builder build;
  };
  for (variant const& v :
       {variant{"replicas", "1F1B", 2, {}, build_stage}, variant{"recompute", "ZB-H1", 1, {}, recomputing},
        variant{"autocast", "1F1B", 1, {.autocast = at::kBFloat16}, build_stage},
        variant{
            "loss scaling", "ZB-H1", 1, {.scaling = chevron::loss_scaling{.initial = 256, .growth_interval = 2}}, build_stage},
        variant{"post-validation", "ZB-H2", 1, {.clip_grad_norm = 1, .post_validation = true, .stable_steps = 1}, build_stage}}) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(v.schedule, {.ranks = 2, .micro_batches = 6})));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      chevron::run_threads({.pipeline_ranks = 2, .replicas = v.replicas}, [&](chevron::transport& comm) {
        train_on(comm, gpu(0), program, graphs, graphs ? with : without, v.options, v.build);
      });
    }
    compare(with, without, v.name);
    check_launched(with, v.name);
  }
}

TEST_CASE("graphs of slices, whose carries go from graph to graph") {
  if (!gpus::at_least(1)) return;
  auto const carrying = [](int number, int, at::Device device) {
    at::manual_seed(number);
    torch::nn::Linear layer(width, width);
    layer->to(device);
    auto const forward = [layer](at::Tensor const& x, at::Tensor state) mutable {
      at::Tensor const sum = layer(x).tanh().cumsum(1), out = state.defined() ? sum + state : sum;
      return std::make_tuple(out, out.narrow(1, out.size(1) - 1, 1).clone());
    };
    return chevron::stage(layer, forward).carries({"state"});
  };
  for (char const* const schedule : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = 2, .micro_batches = 6, .slices = 2})));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
        train_on(comm, gpu(0), program, graphs, graphs ? with : without, {.clip_grad_norm = 1}, carrying);
      });
    }
    compare(with, without, schedule);
    check_launched(with, schedule);
  }
}

TEST_CASE("what CUDA does not capture is said in words, and trains kernel by kernel") {
  if (!gpus::at_least(1)) return;
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 2})));
  struct variant {
    char const* words;
    builder build;
  };
  auto const looking = [](int, int, at::Device device) {
    torch::nn::Linear inner(width, width);
    inner->to(device);
    return chevron::stage(
        [inner](at::Tensor const& x) mutable {
          at::Tensor const y = inner->forward(x);
          return y.sum().item<double>() > 1e9 ? y * 2 : y;
        },
        {{"weight", inner->weight}, {"bias", inner->bias}});
  };
  auto const drawing = [](int, int, at::Device device) {
    torch::nn::Sequential made(torch::nn::Linear(width, width), torch::nn::Dropout(0.1));
    made->to(device);
    return chevron::stage(made);
  };
  for (variant const& v : {variant{"capturing failed: ", looking}, variant{"stage 0 draws random numbers", drawing}}) {
    outcome got;
    chevron::run_threads({.pipeline_ranks = 1},
                         [&](chevron::transport& comm) { train_on(comm, gpu(0), program, true, got, {}, v.build); });
    REQUIRE(got.losses.size() == steps);
    for (double const loss : got.losses) CHECK(std::isfinite(loss));
    MESSAGE(got.why_not[0].back());
    CHECK(got.why_not[0].back().find(v.words) != std::string::npos);
  }
  // LibTorch's allocator, generator and streams work on: the next job is captured.
  outcome after;
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& comm) { train_on(comm, gpu(0), program, true, after); });
  check_launched(after, "after a capture that failed");

  outcome on_cpu;
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& comm) { train_on(comm, at::kCPU, program, true, on_cpu); });
  CHECK(on_cpu.why_not[0].back() == "this rank computes on cpu, not on a GPU");
}

TEST_CASE("graphs between messages over NCCL") {
  if (!gpus::at_least(2)) return;
  for (char const* const name : {"1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(name, {.ranks = 2, .micro_batches = 6})));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      training::over_nccl(
          2, [&](chevron::transport& comm, at::Device mine) { train_on(comm, mine, program, graphs, graphs ? with : without); });
    }
    compare(with, without, name);
    check_launched(with, name);
  }
}

TEST_CASE("memory that another thread takes within a capture is not the graph's, and goes back to the GPU") {
  if (!gpus::at_least(1)) return;
  c10::cuda::CUDAGuard const here(gpu(0));
  auto const reserved = [] { return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[0].current; };
  auto const of_bytes = at::TensorOptions(at::kByte).device(gpu(0));
  chevron::detail::compute_streams streams(gpu(0), false);
  chevron::detail::compute_streams::scope const on_lane(streams);
  at::Tensor const written = at::zeros({64}, of_bytes);
  auto const maker = chevron::cuda_graphs();
  maker->begin(streams);
  std::int64_t const before = reserved();
  auto const graph = maker->capture(streams, [&] {
    written.fill_(1);
    std::thread([&] {
      c10::cuda::CUDAGuard const there(gpu(0));
      at::empty({32 << 20}, of_bytes);
    }).join();
  });
  CHECK(reserved() >= before + (32 << 20));
  c10::cuda::CUDACachingAllocator::emptyCache();
  CHECK(reserved() == before);
  graph->launch();
  CHECK(written.eq(1).all().item<bool>());
}
