// prints: the average evaluates as in a plain forward: yes
// An exponential moving average of the weights: in buffers of each stage, averaged after every step, swapped in to evaluate.
// Checkpoints hold it, since they hold buffers. docs/guides/ema.md explains it.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nn = torch::nn;

// A model with the average of each of its parameters beside it.
struct averaged_impl : nn::Module {
  explicit averaged_impl(nn::Sequential of) : model(register_module("model", std::move(of))) {
    for (auto const& p : model->parameters())
      averages.push_back(register_buffer("average_" + std::to_string(averages.size()), p.detach().clone()));
  }
  at::Tensor forward(at::Tensor x) { return model->forward(x); }

  void update(double decay) {
    at::NoGradGuard const off;
    auto const now = model->parameters();
    for (std::size_t i = 0; i < now.size(); ++i) averages[i].lerp_(now[i], 1 - decay);
  }
  // Called twice it leaves everything as it was.
  void swap() {
    at::NoGradGuard const off;
    auto const now = model->parameters();
    for (std::size_t i = 0; i < now.size(); ++i) {
      at::Tensor const kept = now[i].clone();
      now[i].copy_(averages[i]);
      averages[i].copy_(kept);
    }
  }
  nn::Sequential model;
  std::vector<at::Tensor> averages;
};

std::shared_ptr<averaged_impl> build(int number) {
  at::manual_seed(number);
  auto const tanh = [](at::Tensor x) { return x.tanh(); };
  if (number == 0) return std::make_shared<averaged_impl>(nn::Sequential(nn::Linear(2, 16), nn::Functional(tanh)));
  return std::make_shared<averaged_impl>(nn::Sequential(nn::Linear(16, 1)));
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }

int train(int, char**) {
  constexpr auto program = chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 2, .micro_batches = 4}>;
  at::set_num_threads(1);
  auto const x = at::linspace(-1, 1, 64).view({32, 2}), y = x.sum(1, true).sin();
  std::array<std::shared_ptr<averaged_impl>, 2> stages;  // of both ranks, which are threads here
  double of_weights = 0, of_average = 0;

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    std::shared_ptr<averaged_impl> mine;
    auto const build_stage = [&](int number) { return chevron::stage(mine = stages.at(number) = build(number)); };
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-2),
                              .options = {.post_validation = true}});
    chevron::evaluator evaluator(trainer, 1);  // the batch in one piece
    for (int step = 0; step < 30; ++step) {
      trainer.step(x, y);
      trainer.synchronize();  // with post_validation a step may be undone until then
      mine->update(0.9);
    }
    double const now = evaluator.loss(x, y);
    mine->swap();
    double const average = evaluator.loss(x, y);
    mine->swap();
    if (comm.topology().global_rank == 0) of_weights = now, of_average = average;
  });

  at::NoGradGuard const off;
  for (auto const& s : stages) s->swap();
  double const plain = loss(stages[1]->forward(stages[0]->forward(x)), y).item<double>();
  std::printf("loss of the weights %.6f, of their average %.6f\n", of_weights, of_average);
  std::printf("the average evaluates as in a plain forward: %s\n", of_average == plain ? "yes" : "NO");
  return of_average == plain && of_average != of_weights ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
