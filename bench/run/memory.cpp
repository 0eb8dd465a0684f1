// The memory of activations, by schedule: the same model of 16 blocks, cut into as many stages as the schedule has, on
// ranks that are threads. Prints the plan's chunks in flight and the peak of live bytes in a step, by rank, without the
// bytes that were alive before the step (parameters, gradients, the batch); and the same with every block recomputed.
//
// With --resident each rank is a process of its own, and the figure is the growth of the process's resident size in a step: VmHWM
// above VmRSS before, with malloc set to return large blocks at once.
//
//   bench-memory                       all schedules
//   bench-memory --ranks 4 --microbatches 8
//   bench-memory --resident --samples 256
//   bench-memory --resident --samples 256 --json        the same as JSON, beside which `./dev bench memory` sets PyTorch's
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include "counting_allocator.hpp"
#include "job.hpp"

namespace {

using bench::counting_allocator;
using bench::this_rank;

constexpr int width = 128;
constexpr int blocks = 16;

struct options {
  chevron::shape size{.ranks = 4, .micro_batches = 8};
  int samples = 64;  ///< of a microbatch
  bool resident = false;
  bool json = false;
  std::string schedule;  ///< with `resident`: this one only, on processes forked here

  /// The bytes that a block keeps of a microbatch for its backward: the inputs of two linear layers and of the function between.
  std::int64_t block_bytes() const { return std::int64_t{samples} * width * 9 * std::int64_t{sizeof(float)}; }
};

chevron::stage build_stage(int stages, int number, bool recompute) {
  std::vector<chevron::stage> parts;
  auto const range = chevron::samples_of(blocks, stages, number);
  for (std::int64_t b = 0; b < range.count; ++b) {
    parts.emplace_back(
        torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(), torch::nn::Linear(4 * width, width)));
  }
  return chevron::in_sequence(parts).recompute(recompute);
}

/// Trains two steps on one rank; `begin` is called before the second, `end` after it, on all ranks at the same time.
template <class Begin, class End>
void second_step(chevron::transport& comm, chevron::proved_program const& steps, int samples, bool recompute, Begin&& begin,
                 End&& end) {
  auto const plan = steps.view().plan;
  at::Tensor const x = at::ones({std::int64_t{samples} * plan.size.micro_batches, width});
  chevron::trainer train({.program = steps,
                          .transport = comm,
                          .stages = [&](int s) { return build_stage(plan.stages, s, recompute); },
                          .loss = [](at::Tensor const& y, at::Tensor const& t) { return at::mse_loss(y, t); },
                          .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01))});
  double const here = 0;
  std::vector<double> all(static_cast<std::size_t>(plan.size.ranks));
  train.step({x}, {x});
  comm.all_gather({&here, 1}, all);
  begin();
  comm.all_gather({&here, 1}, all);
  train.step({x}, {x});
  end();
  comm.all_gather({&here, 1}, all);
}

/// Bytes of tensors by rank.
std::vector<std::int64_t> peaks_of(chevron::proved_program const& steps, int samples, bool recompute) {
  auto const plan = steps.view().plan;
  std::vector<std::int64_t> peaks(static_cast<std::size_t>(plan.size.ranks));
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](chevron::transport& comm) {
    this_rank = comm.topology().pipeline_rank();
    std::int64_t before = 0;
    second_step(
        comm, steps, samples, recompute,
        [&] { counting_allocator::peak[this_rank] = before = counting_allocator::live[this_rank]; },
        [&] { peaks[static_cast<std::size_t>(this_rank)] = counting_allocator::peak[this_rank] - before; });
  });
  return peaks;
}

/// A size of this process in bytes, by its name in /proc/self/status.
std::int64_t process_size(std::string const& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name + ":")) return std::atoll(line.c_str() + name.size() + 1) * 1024;
  }
  throw chevron::usage_error("/proc/self/status has no " + name + ". Remedy: Linux");
}

/// One schedule on processes of their own, forked here: the line of the table.
void resident_line(options const& wanted) {
  // Freed memory returns to the system at once, and no thread has a heap of its own.
  mallopt(M_MMAP_THRESHOLD, 32 << 10);
  mallopt(M_TRIM_THRESHOLD, 32 << 10);
  mallopt(M_ARENA_MAX, 1);
  chevron::proved_program const steps = bench::program_of(wanted.schedule, wanted.size.ranks, wanted.size.micro_batches);
  bench::on_ranks("gloo", wanted.size.ranks, 1, [&](chevron::transport& comm) {
    std::int64_t before = 0, peak = 0;
    second_step(
        comm, steps, wanted.samples, false,
        [&] {
          malloc_trim(0);
          std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM starts anew
          before = process_size("VmRSS");
        },
        [&] { peak = process_size("VmHWM"); });
    double const mine[] = {static_cast<double>(peak - before), static_cast<double>(peak)};
    std::vector<double> all(2 * static_cast<std::size_t>(wanted.size.ranks));
    comm.all_gather(mine, all);
    if (comm.topology().global_rank != 0) return;
    if (wanted.json) {
      auto const& plan = steps.view().plan;
      nlohmann::json line = {{"schedule", wanted.schedule},
                             {"stages", plan.stages},
                             {"chunk_mb", static_cast<double>(wanted.block_bytes()) * blocks / plan.stages / 1e6}};
      for (int r = 0; r < wanted.size.ranks; ++r) {
        line["in_flight"].push_back(chevron::peak_in_flight(plan, r));
        line["grown_mb"].push_back(all[2 * static_cast<std::size_t>(r)] / 1e6);
        line["in_all_mb"].push_back(all[2 * static_cast<std::size_t>(r) + 1] / 1e6);
      }
      std::printf("%s\n", line.dump().c_str());
      std::fflush(stdout);
      return;
    }
    std::string chunks, grown;
    char text[32];
    double most = 0, whole = 0;
    for (int r = 0; r < wanted.size.ranks; ++r) {
      chunks += std::to_string(chevron::peak_in_flight(steps.view().plan, r)) + " ";
      std::snprintf(text, sizeof text, "%.1f ", all[2 * static_cast<std::size_t>(r)] / 1e6);
      grown += text;
      most = std::max(most, all[2 * static_cast<std::size_t>(r)]);
      whole = std::max(whole, all[2 * static_cast<std::size_t>(r) + 1]);
    }
    std::printf("%-22s %6d  %-24s %-32s %7.1f  %10.1f\n", wanted.schedule.c_str(), steps.view().plan.stages, chunks.c_str(),
                grown.c_str(), most / 1e6, whole / 1e6);
    std::fflush(stdout);
  });
}

double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    CLI::App app("Bytes of activations alive at the worst moment of a step, by schedule and rank.", "bench-memory");
    app.add_option("--ranks", wanted.size.ranks, "pipeline ranks")->check(CLI::Range(1, 8))->capture_default_str();
    app.add_option("--microbatches", wanted.size.micro_batches, "microbatches in a step")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    app.add_option("--samples", wanted.samples, "in a microbatch")->check(CLI::Range(1, 65536))->capture_default_str();
    auto* const resident =
        app.add_flag("--resident", wanted.resident, "each rank a process: by how much its resident size grows in a step");
    app.add_flag("--json", wanted.json, "with --resident: a line of JSON for each schedule")->needs(resident);
    app.add_option("--schedule", wanted.schedule, "with --resident: this one only");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    if (wanted.resident && !wanted.schedule.empty()) {
      resident_line(wanted);
      return 0;
    }
    if (!wanted.json) {
      std::printf("%d ranks, %d microbatches; a block of the model keeps %.2f MB a microbatch\n\n", wanted.size.ranks,
                  wanted.size.micro_batches, megabytes(wanted.block_bytes()));
      std::printf("%-22s %6s  %-24s %-32s %7s  %10s\n", "schedule", "stages", "chunks in flight by rank",
                  wanted.resident ? "MB more resident, by rank" : "MB by rank", "most",
                  wanted.resident ? "in all" : "recomputed");
    }
    std::fflush(stdout);
    if (wanted.resident) {
      chevron::catalogue::for_each([&](auto const& one) {
        if (!chevron::catalogue::trains(one.name) || chevron::check(chevron::catalogue::make_plan(one.name, wanted.size))) return;
        std::string const command = std::string(values[0]) + " --resident --schedule " + one.name + " --ranks " +
                                    std::to_string(wanted.size.ranks) + " --microbatches " +
                                    std::to_string(wanted.size.micro_batches) + " --samples " + std::to_string(wanted.samples) +
                                    (wanted.json ? " --json" : "");
        code = std::max(code, std::system(command.c_str()) != 0 ? 1 : 0);
      });
      return code;
    }
    static counting_allocator counting;
    c10::SetCPUAllocator(&counting, 1);
    chevron::catalogue::for_each([&](auto const& one) {
      auto const plan = chevron::catalogue::make_plan(one.name, wanted.size);
      if (!chevron::catalogue::trains(one.name) || chevron::check(plan)) return;
      auto const steps = chevron::lower(chevron::prove(plan));
      auto const kept = peaks_of(steps, wanted.samples, false), again = peaks_of(steps, wanted.samples, true);
      std::string chunks, bytes;
      char text[32];
      for (int r = 0; r < wanted.size.ranks; ++r) {
        chunks += std::to_string(chevron::peak_in_flight(plan, r)) + " ";
        std::snprintf(text, sizeof text, "%.1f ", megabytes(kept[static_cast<std::size_t>(r)]));
        bytes += text;
      }
      std::printf("%-22s %6d  %-24s %-32s %7.1f  %10.1f\n", one.name, plan.stages, chunks.c_str(), bytes.c_str(),
                  megabytes(*std::max_element(kept.begin(), kept.end())),
                  megabytes(*std::max_element(again.begin(), again.end())));
    });
    return 0;
  });
}
