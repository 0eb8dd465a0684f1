// prints: step 60  loss 0[.]1
// Two modules, two pipeline ranks, one optimizer: the least code that trains with chevron.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <string_view>

namespace nn = torch::nn;

constexpr std::string_view text = "she sells sea shells by the sea shore; the shells she sells are sea shells, I am sure. ";
constexpr int context = 6, width = 32;

// The model, cut in two: six letters in, a guess of the next letter out.
chevron::stage build_stage(int number) {
  at::manual_seed(number);
  auto const relu = [](at::Tensor x) { return x.relu(); };
  auto const join = [](at::Tensor x) { return x.flatten(1); };
  if (number == 0)
    return nn::Sequential(nn::Embedding(128, width), nn::Functional(join), nn::Linear(context * width, width),
                          nn::Functional(relu));
  return nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({width})), nn::Linear(width, 128));
}

at::Tensor loss(at::Tensor guess, at::Tensor next) { return nn::functional::cross_entropy(guess, next); }

int train(int, char**) {
  // Proved while this file compiles: every microbatch exactly once, no deadlock, matched messages.
  constexpr auto program = chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 2, .micro_batches = 4}>;

  auto const letters = at::empty({static_cast<long>(text.size())}, at::kLong);
  for (std::size_t i = 0; i < text.size(); ++i) letters[static_cast<long>(i)] = static_cast<long>(text[i]);
  auto const windows = letters.unfold(0, context + 1, 1);
  auto const inputs = windows.narrow(1, 0, context), targets = windows.select(1, context);

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const adamw = chevron::optimizer<torch::optim::AdamW>(1e-2);
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = adamw,
                              .options = {.clip_grad_norm = 1.0}});
    for (int step = 0; step < 60; ++step) {
      auto const report = trainer.step(inputs, targets);
      bool const speaks = comm.topology().global_rank == 0 && step % 10 == 9;
      if (speaks) std::printf("step %2ld  loss %.4f  grad norm %.4f\n", report.step + 1, report.loss, report.grad_norm);
    }
  });
  return 0;
}

// What goes wrong becomes a message and an exit code.
int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
