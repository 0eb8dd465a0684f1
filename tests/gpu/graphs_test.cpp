// Computations launched as CUDA graphs: the same as kernel by kernel.
#include "gpus.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/run.hpp>
#include <chevron/run/cuda_graph.hpp>
#include <chevron/run/nccl.hpp>

#include <doctest/doctest.h>

namespace {

constexpr int width = 64, steps = 8;

at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

struct outcome {
  std::vector<double> losses, norms;                // of rank 0, by step
  std::vector<std::vector<at::Tensor>> parameters;  // by stage, on the CPU
  std::vector<std::vector<std::string>> why_not;    // by rank and step
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

using builder = std::function<chevron::stage(int number, int stages, at::Device device)>;

void train_on(chevron::transport& line, at::Device device, chevron::program const& program, bool graphs, outcome& out,
              chevron::trainer_options options = {}, builder const& build = build_stage) {
  constexpr int rows = 24;
  int const stages = program.view().plan.stages;
  options.device = device;
  options.learning_rate = [](long step) { return 1e-3 / static_cast<double>(step + 1); };
  if (graphs) options.graphs = chevron::cuda_graphs();
  chevron::trainer train(
      program, line, [&](int s) { return build(s, stages, device); },
      [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
      chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)), options);
  auto const rank = static_cast<std::size_t>(line.where().global_rank);
  at::Tensor const all = at::arange(3 * rows * width, at::kFloat).view({3 * rows, width}).sin();
  for (int step = 0; step < steps; ++step) {
    int const now = step == 5 ? rows - 6 : rows;  // one batch of another size
    auto const report = train.step({all.narrow(0, step, now)}, {all.narrow(0, rows - step, now).cos()});
    std::string const why = train.why_not_launched();
    for (auto const& e : train.last_record().entries()) {
      if (chevron::is_compute(e.what.what)) CHECK(e.end > e.start);
    }
    std::lock_guard const hold(out.mutex);
    if (out.why_not.size() <= rank) out.why_not.resize(rank + 1);
    out.why_not[rank].push_back(why);
    if (rank != 0) continue;
    out.losses.push_back(report.loss);
    out.norms.push_back(report.grad_norm);
  }
  train.settle();
  std::lock_guard const hold(out.mutex);
  out.parameters.resize(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    if (!train.stages()[static_cast<std::size_t>(s)]) continue;
    for (auto const& p : train.stages()[static_cast<std::size_t>(s)].parameters())
      out.parameters[static_cast<std::size_t>(s)].push_back(p.value.detach().cpu());
  }
}

/// Equal up to the last bits of single precision; says whether to the last bit.
void compare(outcome const& got, outcome const& wanted, std::string const& what) {
  REQUIRE(got.losses.size() == steps);
  REQUIRE(wanted.losses.size() == steps);
  bool same = got.losses == wanted.losses && got.norms == wanted.norms;
  for (std::size_t i = 0; i < got.losses.size(); ++i) {
    CHECK(got.losses[i] == doctest::Approx(wanted.losses[i]).epsilon(1e-5));
    CHECK(got.norms[i] == doctest::Approx(wanted.norms[i]).epsilon(1e-4));
  }
  REQUIRE(got.parameters.size() == wanted.parameters.size());
  for (std::size_t s = 0; s < got.parameters.size(); ++s) {
    REQUIRE(got.parameters[s].size() == wanted.parameters[s].size());
    for (std::size_t i = 0; i < got.parameters[s].size(); ++i) {
      same = same && at::equal(got.parameters[s][i], wanted.parameters[s][i]);
      CHECK(at::allclose(got.parameters[s][i], wanted.parameters[s][i], 1e-4, 1e-6));
    }
  }
  MESSAGE(what << (same ? ": equal to the last bit" : ": equal up to rounding"));
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
    auto const program = chevron::lower(chevron::catalogue::make_plan(one.name, {.ranks = 2, .micro_batches = 6}));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& line) {
        train_on(line, gpu(0), program, graphs, graphs ? with : without, {.clip_grad_norm = 1});
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
        variant{"post-validation", "ZB-H2", 1, {.clip_grad_norm = 1, .post_validation = true, .calm_steps = 1}, build_stage}}) {
    auto const program = chevron::lower(chevron::catalogue::make_plan(v.schedule, {.ranks = 2, .micro_batches = 6}));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      chevron::run_threads({.pipeline_ranks = 2, .replicas = v.replicas}, [&](chevron::transport& line) {
        train_on(line, gpu(0), program, graphs, graphs ? with : without, v.options, v.build);
      });
    }
    compare(with, without, v.name);
    check_launched(with, v.name);
  }
}

TEST_CASE("what CUDA does not capture is said in words, and trains kernel by kernel") {
  if (!gpus::at_least(1)) return;
  auto const program = chevron::lower(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 2}));
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
                         [&](chevron::transport& line) { train_on(line, gpu(0), program, true, got, {}, v.build); });
    REQUIRE(got.losses.size() == steps);
    for (double const loss : got.losses) CHECK(std::isfinite(loss));
    MESSAGE(got.why_not[0].back());
    CHECK(got.why_not[0].back().find(v.words) != std::string::npos);
  }
  // LibTorch's allocator, generator and streams work on: the next job is captured.
  outcome after;
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& line) { train_on(line, gpu(0), program, true, after); });
  check_launched(after, "after a capture that failed");

  outcome on_cpu;
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& line) { train_on(line, at::kCPU, program, true, on_cpu); });
  CHECK(on_cpu.why_not[0].back() == "this rank computes on cpu, not on a GPU");
}

TEST_CASE("graphs between messages over NCCL") {
  if (!gpus::at_least(2)) return;
  for (char const* const name : {"1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    auto const program = chevron::lower(chevron::catalogue::make_plan(name, {.ranks = 2, .micro_batches = 6}));
    outcome without, with;
    for (bool const graphs : {false, true}) {
      auto const store = c10::make_intrusive<c10d::HashStore>();
      std::vector<std::string> said(2);
      std::vector<std::thread> threads;
      for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
          try {
            c10::cuda::CUDAGuard const here(gpu(r));
            auto const watch = std::make_shared<chevron::failure_watch>(store, r, 2);
            chevron::stream_transport<chevron::cuda_streams> line({.pipeline_ranks = 2, .replicas = 1, .global_rank = r}, store,
                                                                  watch, std::chrono::seconds(60), gpu(r));
            train_on(line, gpu(r), program, graphs, graphs ? with : without);
            line.close();
          } catch (std::exception const& e) {
            said[static_cast<std::size_t>(r)] = e.what();
          }
        });
      }
      for (auto& t : threads) t.join();
      for (auto const& each : said) CHECK(each == "");
    }
    compare(with, without, name);
    check_launched(with, name);
  }
}
