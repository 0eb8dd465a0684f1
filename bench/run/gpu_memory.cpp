// The parts of a rank's memory on a GPU: CUDA's context, NCCL, memory that libraries keep, and of LibTorch's allocator
// workspaces, parameters, gradients, the optimizer's state, and activations. Two ranks over NCCL; where they share a GPU, each is
// taken for half.
//
//   bench-gpu_memory [--json FILE]
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/run.hpp>
#include <chevron/run/core/allocator_stats.hpp>
#include <chevron/run/execute/memory_meter.hpp>
#include <chevron/schedule.hpp>

#include "gpu_job.hpp"
#include "job.hpp"

namespace {

struct options {
  std::string schedule = "1F1B";
  int micro_batches = 8;
  int layers = 8;
  int width = 2048;
  int samples = 512;
  std::string json;
};

/// The device's used memory, of all processes.
std::int64_t used_of_device() {
  std::size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(total - free);
}

/// All ranks have come this far.
void meet(chevron::job const& job, std::string const& where) {
  job.store->set(where + std::to_string(job.rank), std::string("1"));
  for (int rank = 0; rank < job.world; ++rank) job.store->wait({where + std::to_string(rank)});
}

chevron::stage build_stage(options const& wanted, at::Device device) {
  return bench::linear_layers(wanted.layers, wanted.width, device);
}

/// Bytes by part of this rank, in the order in which they come to be.
class parts {
 public:
  void add(std::string const& name, std::string const& from, std::int64_t bytes) { all_.push_back({name, from, bytes}); }
  void tell(std::string const& file) const {
    nlohmann::json out = nlohmann::json::object();
    std::printf("%-22s %-28s %12s\n", "part", "is of", "MiB");
    for (auto const& [name, from, bytes] : all_) {
      std::printf("%-22s %-28s %12.1f\n", name.c_str(), from.c_str(), static_cast<double>(bytes) / (1 << 20));
      out[name] = bytes;
    }
    bench::write_json(file, out);
  }

 private:
  struct part {
    std::string name, from;
    std::int64_t bytes;
  };
  std::vector<part> all_;
};

void run(options const& wanted) {
  constexpr int ranks = 2;
  // Rank 1 first uses its GPU after rank 0's measurement: on a shared GPU, the memory used in between is rank 1's context.
  chevron::job const early = chevron::launch({.nproc = ranks});
  auto const found = chevron::look_for_cuda_devices();
  chevron::nccl_options const nccl{.device = chevron::cuda_device_of(early.local_rank, found, {.share = true})};
  bool const share = chevron::share_cuda_device(early.topology(ranks), early, nccl.device);
  std::int64_t before = 0;
  if (early.rank == 0) {
    static_cast<void>(chevron::gpu_of(early.local_rank, nccl));
    before = used_of_device();
    early.store->set("rank 0 has looked", std::string("1"));
  } else {
    early.store->wait({"rank 0 has looked"});
  }
  at::Device const device = chevron::gpu_of(early.local_rank, nccl);
  if (early.rank != 0) static_cast<void>(used_of_device());
  meet(early, "contexts");
  std::int64_t const on_device = share ? ranks : 1;
  chevron::detail::allocator_stats in_allocator(device);
  auto const reserved = [&] { return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).reserved_bytes[0].current; };
  parts out;
  out.add("context", "CUDA, where GPUs are shared", share ? used_of_device() - before : 0);

  at::Tensor const once = at::empty({1}, at::TensorOptions().device(device));
  std::int64_t in_use = in_allocator.in_use();
  auto const grown = [&] {
    std::int64_t const now = in_allocator.in_use();
    return now - std::exchange(in_use, now);
  };
  meet(early, "allocators");
  std::int64_t const outside = used_of_device() - on_device * reserved();
  chevron::nccl_transport comm(early.topology(ranks), early, nccl);
  auto const program = bench::program_of(wanted.schedule, ranks, wanted.micro_batches);
  comm.connect(chevron::edges_of(program.view()));
  meet(early, "connected");
  std::int64_t const connected = used_of_device() - on_device * reserved();
  out.add("NCCL", "a rank's communicators", (connected - outside) / on_device);
  meet(early, "looked at NCCL");
  static_cast<void>(grown());

  std::vector<chevron::stage> made(static_cast<std::size_t>(program.view().plan.stages));
  for (std::size_t s = 0; s < made.size(); ++s) {
    if (program.view().plan.rank_of[s] == early.rank) made[s] = build_stage(wanted, device);
  }
  out.add("parameters", "LibTorch's allocator", grown());
  torch::optim::Optimizer* optimizer = nullptr;
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = [&](int s) { return made[static_cast<std::size_t>(s)]; },
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer =
                              [&](std::vector<at::Tensor> const& all) {
                                auto one = std::make_unique<chevron::fused_adamw>(all, torch::optim::AdamWOptions(1e-3));
                                optimizer = one.get();
                                return one;
                              },
                          .options = {.device = device}});
  out.add("gradients", "LibTorch's allocator", grown());
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});  // the same on all ranks
  at::Tensor const batch = at::randn({std::int64_t{wanted.micro_batches} * wanted.samples, wanted.width}, generator).to(device);
  std::int64_t const batches = grown();
  chevron::step_report last;
  for (int step = 0; step < 3; ++step) last = train.step({batch}, {batch});
  train.synchronize();
  static_cast<void>(bench::ms_when_done(device));
  std::int64_t const kept_by_steps = grown();
  std::int64_t of_optimizer = 0;
  for (auto const& [parameter, state] : optimizer->state()) {
    auto const& adam = static_cast<torch::optim::AdamWParamState const&>(*state);
    of_optimizer += static_cast<std::int64_t>(adam.exp_avg().nbytes() + adam.exp_avg_sq().nbytes());
  }
  out.add("optimizer", "LibTorch's allocator", of_optimizer);
  out.add("batch", "LibTorch's allocator", batches);
  out.add("workspaces, slots", "LibTorch's allocator", kept_by_steps - of_optimizer);
  out.add("activations", "LibTorch's allocator, peak", last.memory.active - in_use);
  out.add("predicted activations", "the plan", last.memory.planned - in_use);
  out.add("cached", "LibTorch's allocator", reserved() - last.memory.active);
  meet(early, "trained");
  out.add("libraries", "kernels and handles", (used_of_device() - on_device * reserved() - connected) / on_device);
  meet(early, "looked at libraries");
  if (early.rank == 0) out.tell(wanted.json);
  comm.close();
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    CLI::App app{"where a rank's memory on a GPU goes", "bench-gpu_memory"};
    options wanted;
    app.add_option("--schedule", wanted.schedule, "of the catalogue")->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--layers", wanted.layers, "of a stage")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--width", wanted.width)->check(CLI::Range(1, 100000))->capture_default_str();
    app.add_option("--samples", wanted.samples, "of a microbatch")->check(CLI::Range(1, 100000))->capture_default_str();
    app.add_option("--json", wanted.json, "write the figures to this file, too");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    run(wanted);
    return 0;
  });
}
