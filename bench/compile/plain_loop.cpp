// The loop of examples/minimal_train.cpp in plain LibTorch: equal modules, data and steps. bench/compile/run_side.py compiles it, since
// its time is the part of a training program that LibTorch alone costs.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <string_view>
#include <vector>

namespace nn = torch::nn;

constexpr std::string_view text = "she sells sea shells by the sea shore; the shells she sells are sea shells, I am sure. ";
constexpr int context = 6, width = 32;

nn::Sequential build_stage(int number) {
  at::manual_seed(number);
  auto const relu = [](at::Tensor x) { return x.relu(); };
  auto const join = [](at::Tensor x) { return x.flatten(1); };
  if (number == 0)
    return nn::Sequential(nn::Embedding(128, width), nn::Functional(join), nn::Linear(context * width, width),
                          nn::Functional(relu));
  return nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({width})), nn::Linear(width, 128));
}

at::Tensor loss(at::Tensor guess, at::Tensor next) { return nn::functional::cross_entropy(guess, next); }

int main() {
  auto const letters = at::empty({static_cast<long>(text.size())}, at::kLong);
  for (std::size_t i = 0; i < text.size(); ++i) letters[static_cast<long>(i)] = static_cast<long>(text[i]);
  auto const windows = letters.unfold(0, context + 1, 1);
  auto const inputs = windows.narrow(1, 0, context), targets = windows.select(1, context);

  auto first = build_stage(0), second = build_stage(1);
  std::vector<at::Tensor> parameters = first->parameters();
  for (auto const& each : second->parameters()) parameters.push_back(each);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    at::Tensor const result = loss(second->forward(first->forward(inputs)), targets);
    result.backward();
    double const norm = nn::utils::clip_grad_norm_(parameters, 1.0);
    optimizer.step();
    if (step % 10 == 9) std::printf("step %2d  loss %.4f  grad norm %.4f\n", step + 1, result.item<double>(), norm);
  }
}
