// The memory of a GPU that a step uses, compared with its plan.
#include "gpus.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <c10/cuda/CUDACachingAllocator.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run.hpp>

#include <doctest/doctest.h>

namespace {

constexpr int width = 128, layers = 16, micro_batches = 16, rows_of_one = 2048;
// A layer keeps its output.
constexpr double layer_bytes = 4.0 * rows_of_one * width;

/// Of the rank on the GPU tensors come from main memory and go back there, so that no other rank has any on it.
chevron::stage build_stage(int number, int stages, at::Device device) {
  std::vector<torch::nn::Linear> all;
  torch::nn::ModuleList all_of_stage;
  for (int layer = number * layers / stages; layer < (number + 1) * layers / stages; ++layer) {
    at::manual_seed(100 + layer);
    torch::nn::Linear& made = all.emplace_back(width, width);
    made->to(device);
    all_of_stage->push_back(made);
  }
  return chevron::stage(all_of_stage, [all, device, last = number == stages - 1](at::Tensor const& came) mutable {
    at::Tensor x = came.to(device);
    for (auto& layer : all) x = layer->forward(x).tanh();
    return last ? x : x.cpu();
  });
}

struct taken {
  chevron::allocator_use step;
  std::int64_t between = 0;  // bytes between steps: parameters, and workspaces of libraries, those of ranks of before among them
};

/// Of a rank on a GPU, the other ranks being on the CPU.
taken of_rank(chevron::plan const& plan, int rank = 0) {
  auto const program = chevron::lower(chevron::prove(plan));
  taken out;
  chevron::run_threads({.pipeline_ranks = plan.size.ranks, .intra_op_threads = 1}, [&](chevron::transport& comm) {
    at::Device const device = comm.topology().global_rank == rank ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
    chevron::trainer train(
        {.program = program,
         .transport = comm,
         .stages = [&](int s) { return build_stage(s, plan.stages, device); },
         .loss = [](at::Tensor const& y, at::Tensor const& target) { return at::mse_loss(y, target.to(y.device())); },
         .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-3)),
         .options = {.device = device}});
    at::Tensor const rows = at::arange(rows_of_one * micro_batches * width, at::kFloat).view({-1, width}).sin();
    for (int step = 0; step < 3; ++step) {
      auto const report = train.step({rows}, {rows.cos()});
      if (comm.topology().global_rank == rank) {
        out = {report.memory, c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current};
      } else {
        CHECK(report.memory.active == 0);
      }
    }
  });
  return out;
}

}  // namespace

TEST_CASE("a rank's memory on a GPU grows as its plan's chunks in flight do: GPipe, 1F1B, V-Half, V-Min") {
  if (!gpus::at_least(1)) return;
  std::map<std::string, taken> took;
  for (std::string const name : {"GPipe", "1F1B", "V-Half", "V-Min"}) {
    auto const plan = chevron::catalogue::make_plan(name, {.ranks = 8, .micro_batches = micro_batches});
    auto const& [use, between] = took[name] = of_rank(plan);
    int const in_flight = chevron::peak_in_flight(plan, 0) * layers / plan.stages;
    MESSAGE(name << ": " << in_flight << " layers in flight, " << layer_bytes * in_flight / (1 << 20) << " MiB; between steps "
                 << between / (1 << 20) << " MiB, planned with them " << use.planned / (1 << 20) << " MiB, active "
                 << use.active / (1 << 20) << " MiB, reserved " << use.reserved / (1 << 20) << " MiB");
    CHECK(use.active > 0);
    CHECK(use.reserved >= use.active);
    CHECK(use.total >= use.reserved);
    // A computation needs some temporary memory; the plan counts the memory that it keeps.
    CHECK(static_cast<double>(use.active) >= static_cast<double>(use.planned) - 4 * layer_bytes);
    CHECK(static_cast<double>(use.active) <= static_cast<double>(use.planned) + 12 * layer_bytes);
  }
  // The last stage keeps more of a chunk than the first stage, of which V-Min has more chunks at its peak than V-Half: so the
  // planned bytes of the two may be equal.
  auto const falls = [&](std::string const& from, std::string const& to) {
    CHECK(took[from].step.active - took[from].between > took[to].step.active - took[to].between);
    CHECK(took[from].step.planned - took[from].between >= took[to].step.planned - took[to].between);
  };
  falls("GPipe", "1F1B");
  falls("1F1B", "V-Half");
  falls("V-Half", "V-Min");
}

TEST_CASE("what I keeps for W is counted: the last rank of ZB-H1, whose W's wait") {
  if (!gpus::at_least(1)) return;
  int const ranks = 8;
  auto const plan = chevron::catalogue::make_plan("ZB-H1", {.ranks = ranks, .micro_batches = micro_batches});
  auto const& [use, between] = of_rank(plan, ranks - 1);
  int const in_flight = chevron::peak_in_flight(plan, ranks - 1) * layers / ranks;
  MESSAGE(in_flight << " layers in flight, " << layer_bytes * in_flight / (1 << 20) << " MiB; between steps "
                    << between / (1 << 20) << " MiB, planned with them " << use.planned / (1 << 20) << " MiB, active "
                    << use.active / (1 << 20) << " MiB");
  // Of a layer W needs the input and the gradient of the output, two tensors of the size that F leaves.
  CHECK(static_cast<double>(use.planned - between) >= 1.5 * layer_bytes * in_flight);
  CHECK(static_cast<double>(use.active) >= static_cast<double>(use.planned) - 4 * layer_bytes);
  CHECK(static_cast<double>(use.active) <= static_cast<double>(use.planned) + 12 * layer_bytes);
}
