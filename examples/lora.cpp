// prints: resumed under ZB-H1: all 20 losses the same in every bit
// LoRA: narrow trained maps beside the frozen layers of a folder. Checkpoints hold the trained part alone; a run that goes on
// from one, under another schedule, must have the losses of the uninterrupted run. docs/guides/lora.md explains it.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/checkpoint.hpp>
#include <chevron/schedule.hpp>

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace nn = torch::nn;
namespace fs = std::filesystem;

constexpr int width = 16, narrow = 2, layers = 4;

// A layer that stays, W x, and what is trained beside it, B A x. B begins at zero, so training begins with the model as it was.
struct adapted_impl : nn::Module {
  explicit adapted_impl(int number) {
    std::string const n = std::to_string(number);
    layer = register_module("layer_" + n, nn::Linear(width, width));
    for (auto& p : layer->parameters()) p.requires_grad_(false);  // before the trainer is made
    a = register_parameter("lora_a_" + n, at::randn({narrow, width}) / width);
    b = register_parameter("lora_b_" + n, at::zeros({width, narrow}));
  }
  at::Tensor forward(at::Tensor x) { return (layer->forward(x) + at::linear(at::linear(x, a), b)).tanh(); }
  nn::Linear layer = nullptr;
  at::Tensor a, b;
};

chevron::stage build_stage(int number) {
  at::manual_seed(number);
  return chevron::in_sequence({std::make_shared<adapted_impl>(2 * number), std::make_shared<adapted_impl>(2 * number + 1)});
}

// Two groups: B learns faster than A.
std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<chevron::named_parameter> const& all) {
  std::vector<at::Tensor> a, b;
  for (auto const& p : all) (p.name.starts_with("lora_a") ? a : b).push_back(p.value);
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(a, std::make_unique<AdamWOptions>(1e-2));
  groups.emplace_back(b, std::make_unique<AdamWOptions>(4e-2));
  return std::make_unique<torch::optim::AdamW>(groups, AdamWOptions());
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }
std::string base_alone(std::string const& name) { return name.starts_with("layer") ? name : ""; }
std::string adapters_alone(std::string const& name) { return name.starts_with("lora") ? name : ""; }

void train_to(long last, chevron::proved_program const& program, fs::path const& base, fs::path const& run,
              std::vector<double>& losses) {
  auto const x = at::linspace(-1, 1, 16 * width).view({16, width}), y = x.flip({0, 1}) * 0.5;
  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    chevron::trainer trainer({.program = program, .transport = comm, .stages = build_stage, .loss = loss, .optimizer = adamw});
    chevron::load_weights(trainer, base, base_alone);  // as from_pretrained would: each rank reads its own layers
    chevron::resume(trainer, run);                     // after the base, which it compares with the one that it was saved beside
    while (trainer.next_step() < last) {
      auto const report = trainer.step(x, y);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    }
    chevron::save_checkpoint(trainer, run, {}, {.trained_only = true});
    chevron::save_weights(trainer, run / "adapters", adapters_alone);  // for others: adapters without their optimizer
  });
}

int train(int, char**) {
  constexpr chevron::shape size{.ranks = 2, .micro_batches = 4};
  constexpr auto one_f_one_b = chevron::lowered<chevron::catalogue::one_f_one_b, size>;
  constexpr auto zb_h1 = chevron::lowered<chevron::catalogue::zb_h1, size>;
  fs::path const at = fs::temp_directory_path() / ("chevron-lora-" + std::to_string(::getpid()));

  auto const base = std::make_shared<nn::Module>();  // stands for the folder of a model that others trained
  at::manual_seed(99);
  for (int i = 0; i < layers; ++i) base->register_module("layer_" + std::to_string(i), nn::Linear(width, width));
  chevron::save_weights(base, at / "base");

  std::vector<double> whole, in_two;
  train_to(20, one_f_one_b, at / "base", at / "whole", whole);
  train_to(10, one_f_one_b, at / "base", at / "in_two", in_two);
  train_to(20, zb_h1, at / "base", at / "in_two", in_two);
  fs::remove_all(at);
  std::printf("loss %.4f, then %.4f\nresumed under ZB-H1: %s\n", whole.front(), whole.back(),
              whole == in_two ? "all 20 losses the same in every bit" : "DIFFERENT");
  return whole == in_two && whole.back() < whole.front() ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
