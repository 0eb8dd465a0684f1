// prints: the same in every bit
// A run that is saved after 10 steps and goes on in a new trainer, beside one that is never interrupted: the losses must be the
// same to the last bit, though the resumed one follows another schedule. It ends with exit code 1 if they are not.
//   cmake --build build --target save_resume && build/bin/save_resume
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/checkpoint.hpp>
#include <chevron/schedule.hpp>

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <vector>

namespace nn = torch::nn;
namespace fs = std::filesystem;

chevron::stage build_stage(int number) {
  at::manual_seed(number);
  auto const dropout = [](at::Tensor x) { return at::dropout(x.tanh(), 0.1, true); };
  if (number == 1) return nn::Sequential(nn::Linear(32, 1));
  return nn::Sequential(nn::Linear(2, 32), nn::Functional(dropout));
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }

// Trains from step `first`, which a checkpoint in `folder` holds if it is not 0, to step `last`, saves, and appends the losses.
void train_steps(long first, long last, chevron::proved_program const& program, fs::path const& folder,
                 std::vector<double>& losses) {
  at::manual_seed(7);
  auto const points = at::rand({64, 2}) * 2 - 1;
  auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-2)});
    if (first > 0) chevron::load_checkpoint(trainer, folder, {{"data", "64 points, seed 7"}});
    while (trainer.next_step() < last) {
      auto const report = trainer.step(points, inside);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    }
    chevron::save_checkpoint(trainer, folder, {{"data", "64 points, seed 7"}});  // all ranks together; words to be compared
  });
}

int train(int, char**) {
  constexpr chevron::shape size{.ranks = 2, .micro_batches = 4};
  constexpr auto one_f_one_b = chevron::lowered<chevron::catalogue::one_f_one_b, size>;
  constexpr auto zb_h1 = chevron::lowered<chevron::catalogue::zb_h1, size>;
  fs::path const folder = fs::temp_directory_path() / ("chevron-save-resume-" + std::to_string(::getpid()));

  std::vector<double> whole, in_two;
  train_steps(0, 20, one_f_one_b, folder / "whole", whole);
  train_steps(0, 10, one_f_one_b, folder / "in_two", in_two);
  train_steps(10, 20, zb_h1, folder / "in_two", in_two);  // a new trainer, which finds the checkpoint
  fs::remove_all(folder);

  std::printf("step 20  loss %.9f uninterrupted, %.9f resumed: %s\n", whole.back(), in_two.back(),
              whole == in_two ? "all 20 the same in every bit" : "DIFFERENT");
  return whole == in_two ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
