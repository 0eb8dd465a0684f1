// The time of a step beside its computations: stages of one small linear layer, which compute next to nothing.
// `./dev bench step` sets torch.distributed.pipelining beside it.
//
//   bench-step_overhead --schedule NAME --backend threads|gloo     one line of JSON: the median step
//   bench-step_overhead … --actions                                 where the time goes, by instruction, on rank 0
#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include "job.hpp"

namespace {

struct options {
  std::string schedule;
  std::string backend = "threads";
  int ranks = 4;
  int micro_batches = 8;
  int steps = 50;
  int width = 64;
  bool actions = false;
};

using clock = std::chrono::steady_clock;

/// Where the time of a rank's steps went: by kind of instruction, how often, and in all in or before it, in seconds.
struct spent {
  std::array<double, chevron::program_kinds> inside{}, waiting{};
  std::array<long, chevron::program_kinds> count{};
};

void rank_main(options const& wanted, chevron::proved_program const& program, chevron::transport& comm) {
  auto const build = [&](int) { return chevron::stage(torch::nn::Linear(wanted.width, wanted.width)); };
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = build,
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01))});
  // The same on all ranks, which compare their batches.
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
  at::Tensor const inputs = at::randn({wanted.micro_batches * 4, wanted.width}, generator);
  at::Tensor const targets = at::randn({wanted.micro_batches * 4, wanted.width}, generator);

  std::vector<double> seconds;
  spent where;
  constexpr int warm_up = 3;  // shapes are learned and memory is set aside in the first step
  for (int step = 0; step < warm_up + wanted.steps; ++step) {
    auto const begin = clock::now();
    train.step({inputs}, {targets});
    if (step < warm_up) continue;
    seconds.push_back(std::chrono::duration<double>(clock::now() - begin).count());
    std::int64_t before = train.last_trace().begin();
    for (chevron::trace_event const& r : train.last_trace().entries()) {
      auto const k = static_cast<std::size_t>(r.op.kind);
      ++where.count[k];
      where.waiting[k] += static_cast<double>(r.start - before) * 1e-9;
      where.inside[k] += static_cast<double>(r.end - r.start) * 1e-9;
      before = r.end;
    }
  }
  if (comm.topology().global_rank != 0) return;
  std::printf(R"({"schedule": "%s", "backend": "%s", "step_ms": %.4f})"
              "\n",
              wanted.schedule.c_str(), wanted.backend.c_str(), chevron::median(seconds) * 1e3);
  if (wanted.actions) {
    std::printf("%-14s %8s %12s %12s\n", "instruction", "a step", "us in it", "us before it");
    for (std::size_t k = 0; k < where.count.size(); ++k) {
      if (where.count[k] == 0) continue;
      auto const n = static_cast<double>(where.count[k]);
      std::printf("%-14s %8.1f %12.1f %12.1f\n", chevron::letters_of(static_cast<chevron::kind>(k)), n / wanted.steps,
                  where.inside[k] / n * 1e6, where.waiting[k] / n * 1e6);
    }
  }
  std::fflush(stdout);
}

int one(options const& wanted) {
  at::set_num_threads(1);
  chevron::proved_program const program = bench::program_of(wanted.schedule, wanted.ranks, wanted.micro_batches);
  bench::on_ranks(wanted.backend, wanted.ranks, 1, [&](chevron::transport& comm) { rank_main(wanted, program, comm); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    CLI::App app("Stages of one small linear layer: the time of a step beside its computations");
    app.add_option("--schedule", wanted.schedule, "a schedule of the catalogue")->required();
    app.add_option("--backend", wanted.backend)->check(CLI::IsMember({"threads", "gloo"}))->capture_default_str();
    app.add_option("--ranks", wanted.ranks)->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->capture_default_str();
    app.add_option("--steps", wanted.steps, "after three that are not counted")->capture_default_str();
    app.add_option("--width", wanted.width, "of the layer; four samples a microbatch")->capture_default_str();
    app.add_flag("--actions", wanted.actions, "also print where the time goes, by instruction, on rank 0");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    return one(wanted);
  });
}
