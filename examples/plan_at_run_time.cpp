// prints: step 60  loss 0[.]0
// A schedule that is chosen when the program runs, proved then by the laws that the compiler knows, and trained on threads.
//   cmake --build build --target plan_at_run_time
//   build/bin/plan_at_run_time ZBVZeroBubble 2 8     a name of docs/reference/schedules.md, ranks, microbatches
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace nn = torch::nn;

// Throws `invalid_schedule_error`, which says the law that a plan breaks, with rank and step.
chevron::proved_program choose(std::string const& name, chevron::shape size) {
  chevron::proved_plan const plan = chevron::prove(chevron::catalogue::make_plan(name, size));
  std::printf("%s: %d stages, bubble %.1f %%\n", plan.view().name, plan.view().stages,
              100 * chevron::bubble_makespan(plan.view(), chevron::costs{}));
  return chevron::lower(plan);
}

int train(int argc, char** argv) {
  // What a wrong one looks like: 1F1B has one chunk a rank.
  try {
    choose("1F1B", {.ranks = 2, .micro_batches = 4, .chunks = 3});
  } catch (chevron::invalid_schedule_error const& e) {
    std::printf("law %s is broken: %s\n", chevron::name_of(e.found().broken), e.what());
  }

  std::string const name = argc > 1 ? argv[1] : "ZBVZeroBubble";
  auto const program = [&] {
    try {
      return choose(name, {.ranks = argc > 2 ? std::atoi(argv[2]) : 2, .micro_batches = argc > 3 ? std::atoi(argv[3]) : 8});
    } catch (chevron::invalid_schedule_error const& e) {
      throw chevron::usage_error(std::string(e.what()) + ". Remedy: a schedule of docs/reference/schedules.md");  // exit code 2
    }
  }();

  // As many stages as the schedule has.
  int const last = program.view().plan.stages - 1;
  auto const build_stage = [&](int s) {
    at::manual_seed(static_cast<std::uint64_t>(s));
    nn::Sequential layers(nn::Linear(s == 0 ? 2 : 32, s == last ? 1 : 32));
    if (s != last) layers->push_back(nn::Functional([](at::Tensor x) { return x.tanh(); }));
    return chevron::stage(layers);
  };
  auto const loss = [](at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); };
  at::manual_seed(7);
  auto const points = at::rand({256, 2}) * 2 - 1;
  auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const adamw = chevron::optimizer<torch::optim::AdamW>(1e-2);
    chevron::trainer trainer({.program = program, .transport = comm, .stages = build_stage, .loss = loss, .optimizer = adamw});
    for (int step = 1; step <= 60; ++step) {
      auto const report = trainer.step(points, inside);
      if (comm.topology().global_rank == 0 && step % 20 == 0) std::printf("step %d  loss %.4f\n", step, report.loss);
    }
  });
  return 0;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
