// prints: step 60  loss 0[.]0[0-9]+
// Data parallel alone: a whole model on each of four processes, a quarter of the batch for each. Also: torchrun, srun, mpirun.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/multiprocess.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>

namespace nn = torch::nn;

int train(int, char**) {
  constexpr auto program = chevron::lowered<chevron::catalogue::gpipe, chevron::shape{.ranks = 1, .micro_batches = 1}>;
  chevron::run_processes(program, {.replicas = 4}, [&](chevron::transport& comm) {
    at::manual_seed(1);  // replicas begin alike
    auto const points = at::rand({1024, 2}) * 2 - 1, mine = points.chunk(4)[comm.topology().replica()];
    nn::Sequential model(nn::Linear(2, 32), nn::Functional([](at::Tensor x) { return x.tanh(); }), nn::Linear(32, 1));
    auto const loss = [](at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); };
    auto const adamw = chevron::optimizer<torch::optim::AdamW>(3e-2);
    chevron::trainer trainer({program, comm, [&](int) { return model; }, loss, adamw});
    for (int step = 1; step <= 60; ++step) {
      auto const report = trainer.step(mine, mine.square().sum(1, true).lt(0.5).to(at::kFloat));  // summed over replicas
      if (step % 20 == 0 && comm.topology().global_rank == 0) std::printf("step %d  loss %.4f\n", step, report.loss);
    }
  });
  return 0;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
