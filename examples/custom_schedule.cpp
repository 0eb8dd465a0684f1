// prints: step 160 +loss 0\.0
// A schedule of your own, proved and run: "eager" 1F1B. Twice 1F1B's warm-up, so that on slow links each gradient finds the next
// forward already there. It costs activations, so it declares how many, and the gate holds it to that.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <iostream>

using namespace chevron::letters;
namespace nn = torch::nn;

inline constexpr auto eager = chevron::schedule(chevron::placement::linear,
    chevron::warmup(F * (2 * (ranks - 1 - rank))) | chevron::steady(F, B) | chevron::cooldown(B))
        .at_most_in_flight(2 * ranks - 1)
        .named("eager 1F1B");

constexpr chevron::shape size{.ranks = 3, .micro_batches = 8};
constexpr auto proved = chevron::checked<eager, size>;
constexpr auto classic = chevron::checked<chevron::catalogue::one_f_one_b, size>;

// What it is for, and what it costs, both checked by the compiler: on links that take half as long as a forward it is faster …
constexpr chevron::costs slow_links{.forward = 1, .backward_input = 1, .backward_weight = 1, .communication = 0.5};
static_assert(chevron::makespan(proved, slow_links) < chevron::makespan(classic, slow_links));
static_assert(chevron::makespan(proved, chevron::costs{}) == chevron::makespan(classic, chevron::costs{}));
// … for up to P - 1 more chunks in flight.
static_assert(chevron::peak_in_flight(proved, 0) == 5 && chevron::peak_in_flight(classic, 0) == 3);

int train(int, char**) {
  std::cout << chevron::show::timeline_text(proved, slow_links) << '\n';

  // The same schedule trains: a circle or a ring, from two coordinates, on three ranks of this process.
  auto const build_stage = [](int stage) {
    at::manual_seed(stage);
    auto const tanh = [](at::Tensor x) { return x.tanh(); };
    if (stage == 2) return chevron::stage(nn::Sequential(nn::Linear(32, 1)));
    return chevron::stage(nn::Sequential(nn::Linear(stage == 0 ? 2 : 32, 32), nn::Functional(tanh)));
  };
  auto const loss = [](at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); };
  at::manual_seed(7);
  auto const points = at::rand({256, 2}) * 2 - 1;
  auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);

  constexpr auto program = chevron::lowered<eager, size>;
  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const adamw = chevron::optimizer<torch::optim::AdamW>(1e-2);
    chevron::trainer trainer({.program = program, .transport = comm, .stages = build_stage, .loss = loss, .optimizer = adamw});
    for (int step = 1; step <= 160; ++step) {
      auto const report = trainer.step(points, inside);
      if (comm.topology().global_rank == 0 && step % 40 == 0) {
        std::printf("step %3d  loss %.4f  peak in flight %d\n", step, report.loss, report.peak_in_flight);
      }
    }
  });
  return 0;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
