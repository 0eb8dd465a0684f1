// How much memory activations take, by schedule: the same model of 16 blocks, cut into as many stages as the schedule has, on
// ranks that are threads. Beside the plan's chunks in flight stand the bytes that were really alive at the worst moment of a
// step, by rank, above what was there before it (parameters, gradients, the batch); and the same with every block recomputed.
//
//   bench-memory                       all schedules
//   bench-memory --ranks 4 --microbatches 8
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

namespace {

constexpr int most_ranks = 64;
constexpr int width = 128;
constexpr int samples = 64;  // of a microbatch
constexpr int blocks = 16;

thread_local int this_rank = most_ranks;

/// Counts the bytes of tensors alive, by the rank that made them.
class counting_allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    header const mine{static_cast<std::int64_t>(bytes), this_rank};
    std::memcpy(block, &mine, sizeof mine);
    std::int64_t const now = live[this_rank] += mine.bytes;
    for (std::int64_t most = peak[this_rank]; now > most && !peak[this_rank].compare_exchange_weak(most, now);) {
    }
    return {block + 64, block + 64, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static inline std::atomic<std::int64_t> live[most_ranks + 1], peak[most_ranks + 1];

 private:
  struct header {
    std::int64_t bytes;
    int rank;
  };
  static void release(void* memory) {
    char* const block = static_cast<char*>(memory) - 64;
    header mine{};
    std::memcpy(&mine, block, sizeof mine);
    live[mine.rank] -= mine.bytes;
    std::free(block);
  }
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

/// Bytes by rank.
std::vector<std::int64_t> peaks_of(chevron::program const& steps, bool recompute) {
  auto const plan = steps.view().plan;
  std::vector<std::int64_t> peaks(static_cast<std::size_t>(plan.size.ranks));
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](chevron::transport& line) {
    at::Tensor const x = at::ones({samples * plan.size.micro_batches, width});
    this_rank = line.where().pipeline_rank();
    chevron::trainer train(
        steps, line, [&](int s) { return build_stage(plan.stages, s, recompute); },
        [](at::Tensor const& y, at::Tensor const& t) { return at::mse_loss(y, t); },
        chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01)));
    train.step({x}, {x});
    double const here = 0;
    std::vector<double> all(peaks.size());
    line.gather({&here, 1}, all);  // nobody starts before all have counted
    std::int64_t const before = counting_allocator::live[this_rank];
    counting_allocator::peak[this_rank] = before;
    line.gather({&here, 1}, all);
    train.step({x}, {x});
    peaks[static_cast<std::size_t>(this_rank)] = counting_allocator::peak[this_rank] - before;
    line.gather({&here, 1}, all);
  });
  return peaks;
}

double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

}  // namespace

int main(int argc, char** argv) {
  chevron::shape size{.ranks = 4, .micro_batches = 8};
  CLI::App app("Bytes of activations alive at the worst moment of a step, by schedule and rank.", "bench-memory");
  app.add_option("--ranks", size.ranks, "pipeline ranks")->check(CLI::Range(1, 8))->capture_default_str();
  app.add_option("--microbatches", size.micro_batches, "microbatches in a step")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  static counting_allocator counting;
  c10::SetCPUAllocator(&counting, 1);

  std::printf("%d ranks, %d microbatches; a block of the model keeps %.2f MB a microbatch\n\n", size.ranks, size.micro_batches,
              megabytes(std::int64_t{samples} * width * 4 * 9));
  std::printf("%-22s %6s  %-24s %-32s %7s  %10s\n", "schedule", "stages", "chunks in flight by rank", "MB by rank", "most",
              "recomputed");
  chevron::catalogue::for_each([&](auto const& one) {
    auto const plan = chevron::catalogue::make_plan(one.name, size);
    if (chevron::check(plan)) return;
    auto const steps = chevron::lower(plan);
    auto const kept = peaks_of(steps, false), again = peaks_of(steps, true);
    std::string chunks, bytes;
    char text[32];
    for (int r = 0; r < size.ranks; ++r) {
      chunks += std::to_string(chevron::peak_in_flight(plan, r)) + " ";
      std::snprintf(text, sizeof text, "%.1f ", megabytes(kept[static_cast<std::size_t>(r)]));
      bytes += text;
    }
    std::printf("%-22s %6d  %-24s %-32s %7.1f  %10.1f\n", one.name, plan.stages, chunks.c_str(), bytes.c_str(),
                megabytes(*std::max_element(kept.begin(), kept.end())), megabytes(*std::max_element(again.begin(), again.end())));
  });
  return 0;
}
