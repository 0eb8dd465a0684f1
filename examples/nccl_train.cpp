// prints: step 60  loss 0[.]
// skipped: no GPU for local rank
// serial: it takes the GPUs
// Ranks on GPUs, over NCCL: one process a rank, one GPU a process. Forked here, or started by torchrun, srun or mpirun.
// It links chevron::nccl, and needs a LibTorch for CUDA; without GPUs it says what is missing and ends with exit code 2.
//   cmake --build build --target nccl_train && build/bin/nccl_train
//   torchrun --nproc-per-node 2 --no-python build/bin/nccl_train
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/nccl.hpp>
#include <chevron/schedule.hpp>

#include <chrono>
#include <cstdio>

namespace nn = torch::nn;

constexpr chevron::shape size{.ranks = 2, .micro_batches = 4};
constexpr auto program = chevron::lowered<chevron::catalogue::zb_h1, size>;

chevron::stage build_stage(int number, at::Device device) {
  at::manual_seed(static_cast<std::uint64_t>(number));
  auto const tanh = [](at::Tensor x) { return x.tanh(); };
  nn::Sequential layers = number == 1 ? nn::Sequential(nn::Linear(32, 1))
                                      : nn::Sequential(nn::Linear(2, 32), nn::Functional(tanh), nn::Linear(32, 32));
  layers->to(device);  // before the trainer sees it
  return layers;
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }

int train(int, char**) {
  // Without a launcher two processes are forked here, one for each rank.
  chevron::run_gpus(program, {.deadline = std::chrono::seconds(60)}, [](chevron::transport& comm, at::Device device) {
    at::manual_seed(7);  // all ranks of a pipeline need the same batch
    auto const points = at::rand({512, 2}) * 2 - 1;
    auto const inside = points.square().sum(1, true).lt(0.5).to(at::kFloat);
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = [&](int s) { return build_stage(s, device); },
                              .loss = loss,
                              .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-2),
                              .options = {.device = device}});
    for (int step = 1; step <= 60; ++step) {
      auto const report = trainer.step(points, inside);  // the trainer brings the batch to the GPU
      if (comm.topology().global_rank == 0 && step % 20 == 0) std::printf("step %d  loss %.4f\n", step, report.loss);
    }
  });
  return 0;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
