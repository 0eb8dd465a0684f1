// What a step costs beside its computations, on a GPU: how long the host takes to ask for one action, and how long the GPU has
// nothing to do between two of them. One rank, so that it waits for nobody; all stages of the schedule are on it.
//
//   bench-gpu_step [--json FILE]                       blocks of about one millisecond, and layers next to nothing; graphs, too
//   .venv/bin/python bench/run/gpu_step_beside_torch.py   the latter beside torch.distributed.pipelining
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/randn.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/plan/profile.hpp>
#include <chevron/run.hpp>
#include <chevron/run/cuda/cuda_graph.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>
#include <chevron/run/launch/run_main.hpp>
#include <chevron/schedule.hpp>

#include "job.hpp"

namespace {

struct options {
  int micro_batches = 8;
  int steps = 20;
  std::string json;
};

struct figures {
  std::size_t actions = 0;  ///< computations of a step
  double host_us = 0;       ///< for the host to ask for an action
  double action_ms = 0;     ///< that the GPU takes for one
  double idle = 0;          ///< share of the time between a step's first action and its last in which the GPU had none of them
};

chevron::stage layers(int count, int width, at::Device device) {
  torch::nn::Sequential out;
  for (int i = 0; i < count; ++i) {
    out->push_back(torch::nn::Linear(width, width));
    out->push_back(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  }
  out->to(device);
  return out;
}

figures measure(options const& wanted, std::string const& schedule, int layers_of_stage, int width, int samples, bool graphs) {
  auto const program = bench::program_of(schedule, 1, wanted.micro_batches);
  at::Device const device = chevron::gpu_of(0);
  std::vector<double> host, action, idle;
  std::size_t actions = 0;
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& comm) {
    c10::cuda::set_device(device.index());
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages = [&](int) { return layers(layers_of_stage, width, device); },
                            .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                            .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-3)),
                            .options = {.device = device, .graphs = graphs ? chevron::cuda_graphs() : nullptr}});
    at::Tensor const batch = at::randn({wanted.micro_batches * samples, width}, at::TensorOptions().device(device));
    for (int step = 0; step < wanted.steps; ++step) {
      bool const launched = train.step({batch}, {batch}).used_graphs;
      if (step < 5) continue;
      if (launched != graphs) throw chevron::usage_error("no CUDA graphs: " + train.graph_fallback_reason());
      auto const& record = train.last_trace();
      std::vector<std::pair<std::int64_t, std::int64_t>> busy;
      std::int64_t asked = record.begin();
      for (chevron::trace_event const& r : record.entries()) {
        if (chevron::is_compute(r.op.kind)) busy.emplace_back(r.start, r.end);
        if (r.op.kind == chevron::kind::optimizer_step) asked = r.reached;
      }
      host.push_back(static_cast<double>(asked - record.begin()) * 1e-3 / static_cast<double>(busy.size()));
      actions = busy.size();
      std::sort(busy.begin(), busy.end());
      std::int64_t nothing = 0, until = busy.front().first, sum = 0;
      for (auto const& [start, end] : busy) {
        nothing += std::max<std::int64_t>(0, start - until);
        until = std::max(until, end);
        sum += end - start;
      }
      idle.push_back(static_cast<double>(nothing) / static_cast<double>(until - busy.front().first));
      action.push_back(static_cast<double>(sum) * 1e-6 / static_cast<double>(busy.size()));
    }
  });
  return {actions, chevron::median(host), chevron::median(action), chevron::median(idle)};
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    CLI::App app{"what a step costs beside its computations, on a GPU", "bench-gpu_step"};
    options wanted;
    app.add_option("--microbatches", wanted.micro_batches)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--steps", wanted.steps, "the first five are not counted")
        ->check(CLI::Range(6, 100000))
        ->capture_default_str();
    app.add_option("--json", wanted.json, "write the figures to this file, too");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    nlohmann::json out = nlohmann::json::array();
    std::printf("%-22s %-20s %-8s %14s %14s %10s\n", "schedule", "stage", "launched", "host us/action", "GPU ms/action",
                "GPU idle");
    for (char const* const schedule : {"1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"}) {
      struct size {
        char const* name;
        int layers, width, samples;
      };
      for (size const& s : {size{"1 layer of 64", 1, 64, 4}, size{"8 layers of 4096", 8, 4096, 512}}) {
        for (bool const graphs : {false, true}) {
          figures const f = measure(wanted, schedule, s.layers, s.width, s.samples, graphs);
          std::printf("%-22s %-20s %-8s %14.1f %14.3f %9.2f%%\n", schedule, s.name, graphs ? "graphs" : "kernels", f.host_us,
                      f.action_ms, f.idle * 100);
          out.push_back({{"schedule", schedule},
                         {"stage", s.name},
                         {"graphs", graphs},
                         {"actions", f.actions},
                         {"host_us", f.host_us},
                         {"action_ms", f.action_ms},
                         {"idle", f.idle}});
        }
      }
    }
    if (!wanted.json.empty()) std::ofstream(wanted.json) << out.dump(1) << "\n";
    return 0;
  });
}
