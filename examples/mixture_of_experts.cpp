// prints: 10 losses the same in every bit as in a plain loop
// A mixture of experts in each of three stages, each with a loss that spreads samples over its experts.
// docs/guides/mixture-of-experts.md explains it.
#include <ATen/ops/one_hot.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace nn = torch::nn;

constexpr int width = 8, count = 4, micro_batches = 4, stages = 3;

struct experts_impl : nn::Module {
  explicit experts_impl(int number) {
    at::manual_seed(number);
    gate = register_module("gate", nn::Linear(width, count));
    for (int e = 0; e < count; ++e) experts.push_back(register_module("expert_" + std::to_string(e), nn::Linear(width, width)));
  }
  // Each sample goes to the expert with the largest share of its gate (Switch Transformers, arXiv 2101.03961).
  at::Tensor forward(at::Tensor x) {
    at::Tensor const shares = gate->forward(x).softmax(-1);
    auto const [weight, chosen] = shares.max(-1);
    at::Tensor y = x;
    for (int e = 0; e < count; ++e) {
      at::Tensor const rows = chosen.eq(e).nonzero().squeeze(1);
      at::Tensor const of_expert = experts[e]->forward(x.index_select(0, rows)).tanh();
      y = y.index_add(0, rows, of_expert * weight.index_select(0, rows).unsqueeze(1));
    }
    at::Tensor const sent = at::one_hot(chosen, count).to(at::kFloat).mean(0);
    chevron::add_loss("balance", count * (sent * shares.mean(0)).sum());
    return y;
  }
  nn::Linear gate = nullptr;
  std::vector<nn::Linear> experts;
};

constexpr double factor = 0.01;

chevron::stage build_stage(int number) {
  return chevron::stage(std::make_shared<experts_impl>(number)).losses({{.name = "balance", .factor = factor}});
}

int train(int, char**) {
  constexpr auto program =
      chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = stages, .micro_batches = micro_batches}>;
  at::set_num_threads(1);
  at::manual_seed(7);
  auto const x = at::randn({32, width}), y = x.flip({1});
  std::vector<double> losses, balances, plain;

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const sgd = chevron::optimizer<torch::optim::SGD>(0.1);
    chevron::trainer trainer(
        {.program = program, .transport = comm, .stages = build_stage, .loss = nn::MSELoss(), .optimizer = sgd});
    for (int step = 0; step < 10; ++step) {
      auto const report = trainer.step(x, y);
      if (comm.topology().global_rank != 0) continue;
      losses.push_back(report.loss);
      balances.push_back(report.losses[0].value);
    }
  });

  experts_impl model[] = {experts_impl(0), experts_impl(1), experts_impl(2)};
  std::vector<at::Tensor> all;
  for (auto& s : model)
    for (auto const& p : s.parameters()) all.push_back(p);
  torch::optim::SGD sgd(all, 0.1);
  for (int step = 0; step < 10; ++step) {
    double sum = 0;
    sgd.zero_grad(false);
    for (int k = 0; k < micro_batches; ++k) {
      chevron::collected_losses given;
      at::Tensor h = x.narrow(0, 8 * k, 8);
      for (auto& s : model) h = s.forward(h);
      at::Tensor const part = at::mse_loss(h, y.narrow(0, 8 * k, 8));
      ((part + factor * given.sum("balance")) / micro_batches).backward();
      sum += part.item<double>() / micro_batches;
    }
    sgd.step();
    plain.push_back(sum);
  }
  std::printf("loss %.6f, then %.6f\nbalance of %d stages %.4f, then %.4f\n10 losses %s in a plain loop\n", losses.front(),
              losses.back(), stages, balances.front(), balances.back(),
              losses == plain ? "the same in every bit as" : "DIFFERENT from those");
  return losses == plain ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
