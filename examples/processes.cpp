// prints: step 60  loss 0[.]0[0-9]+  held out 0[.]0
// Ranks as processes: forked here, or started by torchrun, srun or mpirun, on one machine or several.
//   build/bin/processes
//   torchrun --nproc-per-node 2 --no-python build/bin/processes
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/multiprocess.hpp>
#include <chevron/schedule.hpp>

#include <chrono>
#include <cstdio>

namespace nn = torch::nn;

chevron::stage build_stage(int number) {
  at::manual_seed(number);  // the same weights on every layout, and in every replica
  auto const tanh = [](at::Tensor x) { return x.tanh(); };
  if (number == 1) return nn::Sequential(nn::Linear(32, 1));
  return nn::Sequential(nn::Linear(2, 32), nn::Functional(tanh), nn::Linear(32, 32), nn::Functional(tanh));
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }

int train(int, char**) {
  constexpr auto const& program = chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = 4}>;

  // Before anything of LibTorch: from here on this is one rank of several.
  bool const by_a_launcher = chevron::read_environment().world > 1;
  chevron::launched const rank = chevron::launch({.nproc = by_a_launcher ? 0 : 2});
  chevron::gloo_transport line(rank.place(/*pipeline_ranks=*/2), rank);
  line.deadline(std::chrono::seconds(60));  // the longest that a rank waits for another

  at::manual_seed(7);  // all ranks of a pipeline need the same batch
  auto const points = at::rand({512, 2}) * 2 - 1;
  auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);
  auto const seen = points.narrow(0, 0, 256), unseen = points.narrow(0, 256, 256);
  auto const truth = inside.narrow(0, 0, 256), hidden = inside.narrow(0, 256, 256);

  chevron::trainer train(program, line, build_stage, loss,
                         chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2)));
  chevron::evaluator evaluate(train);
  for (int step = 1; step <= 60; ++step) {
    auto const report = train.step({seen}, {truth});
    if (step % 20 != 0) continue;
    double const held_out = evaluate.loss({unseen}, {hidden});  // on every rank alike
    if (rank.rank == 0) std::printf("step %d  loss %.4f  held out %.4f\n", step, report.loss, held_out);
  }
  line.close();
  return 0;
}

// What goes wrong becomes a message, is told to the other ranks, and becomes an exit code.
int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
