// Training on GPUs: the same executor, transports and laws as on the CPU.
#include "gpus.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/run.hpp>
#include <chevron/run/nccl.hpp>

namespace {

constexpr int width = 64, samples = 24, steps = 3;

struct outcome {
  std::vector<double> losses;                  // by step
  std::vector<std::vector<at::Tensor>> stages;  // parameters, on the CPU
  std::mutex mutex;
};

/// Eight layers, in as many stages as there are to be.
chevron::stage build_stage(int number, int stages, at::Device device) {
  torch::nn::Sequential out;
  for (int layer = number * 8 / stages; layer < (number + 1) * 8 / stages; ++layer) {
    at::manual_seed(100 + layer);
    out->push_back(torch::nn::Linear(width, width));
    out->push_back(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  }
  out->to(device);
  return out;
}

void train_on(chevron::transport& line, at::Device device, chevron::program const& program, outcome& out) {
  int const stages = program.view().plan.stages;
  chevron::trainer train(
      program, line, [&](int s) { return build_stage(s, stages, device); },
      [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
      chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)), {.clip_grad_norm = 1, .device = device});
  at::Tensor const all = at::arange(2 * samples * width, at::kFloat).view({2 * samples, width}).sin();
  for (int step = 0; step < steps; ++step) {
    auto const report = train.step({all.narrow(0, step, samples)}, {all.narrow(0, samples - step, samples).cos()});
    auto const entries = train.last_record().entries();
    std::lock_guard const hold(out.mutex);
    if (line.where().global_rank == 0) out.losses.push_back(report.loss);
    for (auto const& e : entries) {
      if (chevron::is_compute(e.what.what)) CHECK(e.end > e.start);
    }
    CHECK(report.bubble >= 0);
    CHECK(report.bubble < 1);
  }
  std::lock_guard const hold(out.mutex);
  out.stages.resize(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    if (!train.stages()[static_cast<std::size_t>(s)]) continue;
    for (auto const& p : train.stages()[static_cast<std::size_t>(s)].parameters())
      out.stages[static_cast<std::size_t>(s)].push_back(p.value.detach().cpu());
  }
}

std::vector<at::Tensor> in_a_row(outcome const& o) {
  std::vector<at::Tensor> out;
  for (auto const& of_stage : o.stages) out.insert(out.end(), of_stage.begin(), of_stage.end());
  return out;
}

/// Equal up to the last bits of single precision; says whether to the last bit.
void compare(outcome const& got, outcome const& wanted, std::string const& what) {
  auto const a = in_a_row(got), b = in_a_row(wanted);
  REQUIRE(a.size() == b.size());
  REQUIRE(got.losses.size() == wanted.losses.size());
  bool same = got.losses == wanted.losses;
  for (std::size_t i = 0; i < a.size(); ++i) {
    same = same && at::equal(a[i], b[i]);
    CHECK(at::allclose(a[i], b[i], 1e-4, 1e-6));
  }
  for (std::size_t i = 0; i < got.losses.size(); ++i) CHECK(got.losses[i] == doctest::Approx(wanted.losses[i]).epsilon(1e-5));
  MESSAGE(what << (same ? ": equal to the last bit" : ": equal up to rounding"));
}

at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

}  // namespace

TEST_CASE("every schedule trains on a GPU as the un-pipelined model does: ranks as threads on one") {
  if (!gpus::at_least(1)) return;
  chevron::catalogue::for_each([&](auto const& one) {
    int const ranks = 2, micro_batches = 6;
    auto const made = chevron::catalogue::make_plan(one.name, {.ranks = ranks, .micro_batches = micro_batches});
    auto const program = chevron::lower(made);
    outcome pipelined, alone;
    chevron::run_threads({.pipeline_ranks = ranks}, [&](chevron::transport& line) { train_on(line, gpu(0), program, pipelined); });
    auto const one_rank = chevron::lower(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = micro_batches}));
    chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& line) { train_on(line, gpu(0), one_rank, alone); });
    compare(pipelined, alone, one.name);
  });
}

TEST_CASE("replicas on one GPU add their gradients") {
  if (!gpus::at_least(1)) return;
  auto const program = chevron::lower(chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4}));
  outcome on_gpu, on_cpu;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](chevron::transport& line) { train_on(line, gpu(0), program, on_gpu); });
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](chevron::transport& line) { train_on(line, at::kCPU, program, on_cpu); });
  compare(on_gpu, on_cpu, "2 × 2");
}

TEST_CASE("NCCL between GPUs trains as threads do") {
  if (!gpus::at_least(2)) return;
  for (char const* const name : {"GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    auto const program = chevron::lower(chevron::catalogue::make_plan(name, {.ranks = 2, .micro_batches = 6}));
    outcome by_nccl, by_threads;
    chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& line) {
      at::Device const mine = gpu(line.where().global_rank);
      c10::cuda::CUDAGuard const here(mine);
      train_on(line, mine, program, by_threads);
    });
    auto const store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> said(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        try {
          c10::cuda::CUDAGuard const here(gpu(r));
          auto const watch = std::make_shared<chevron::failure_watch>(store, r, 2);
          chevron::stream_transport<chevron::cuda_streams> line({.pipeline_ranks = 2, .replicas = 1, .global_rank = r}, store, watch,
                                                                std::chrono::seconds(60), gpu(r));
          train_on(line, gpu(r), program, by_nccl);
          line.close();
        } catch (std::exception const& e) {
          said[static_cast<std::size_t>(r)] = e.what();
        }
      });
    }
    for (auto& t : threads) t.join();
    for (auto const& each : said) CHECK(each == "");
    compare(by_nccl, by_threads, name);
  }
}

TEST_CASE("one NCCL rank alone: streams, events and the end of a job") {
  if (!gpus::at_least(1)) return;
  auto const store = c10::make_intrusive<c10d::HashStore>();
  auto const watch = std::make_shared<chevron::failure_watch>(store, 0, 1);
  chevron::stream_transport<chevron::cuda_streams> line({}, store, watch, std::chrono::seconds(60), gpu(0));
  auto const program = chevron::lower(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 4}));
  outcome out;
  train_on(line, gpu(0), program, out);
  CHECK(out.losses.size() == steps);
  line.close();
}
