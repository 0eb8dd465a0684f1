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
  constexpr auto program = chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = 4}>;

  // Before anything of LibTorch. In here each process is one rank: two are forked, unless a launcher has started them.
  chevron::run_processes(program, {.deadline = std::chrono::seconds(60)}, [&](chevron::transport& comm) {
    at::manual_seed(7);  // all ranks of a pipeline need the same batch
    auto const points = at::rand({512, 2}) * 2 - 1;
    auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);
    auto const seen = points.narrow(0, 0, 256), unseen = points.narrow(0, 256, 256);
    auto const truth = inside.narrow(0, 0, 256), hidden = inside.narrow(0, 256, 256);

    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-2)});
    chevron::evaluator evaluator(trainer);
    for (int step = 1; step <= 60; ++step) {
      auto const report = trainer.step(seen, truth);
      if (step % 20 != 0) continue;
      double const held_out = evaluator.loss(unseen, hidden);  // on every rank alike
      if (comm.topology().global_rank == 0) std::printf("step %d  loss %.4f  held out %.4f\n", step, report.loss, held_out);
    }
  });
  return 0;
}

// What goes wrong becomes a message, is told to the other ranks, and becomes an exit code.
int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
