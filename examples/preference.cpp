// prints: loss 0[.]693147 at first
// Two models in one pipeline: direct preference optimisation (DPO, arXiv 2305.18290). Each stage holds its part of the policy
// and, frozen, of the reference. docs/guides/two-models.md explains it.
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <memory>
#include <tuple>
#include <vector>

namespace nn = torch::nn;
using two = std::tuple<at::Tensor, at::Tensor>;

constexpr int width = 8, micro_batches = 4;

struct pair_impl : nn::Module {
  explicit pair_impl(int number) {
    at::manual_seed(number);
    policy = register_module("policy", nn::Linear(width, width));
    at::manual_seed(number);
    reference = register_module("reference", nn::Linear(width, width));
    for (auto& p : reference->parameters()) p.requires_grad_(false);
  }
  two forward(at::Tensor of_policy, at::Tensor of_reference) {
    at::Tensor const trained = policy->forward(of_policy).tanh();
    at::NoGradGuard const off;  // no graph is kept for the reference
    return {trained, reference->forward(of_reference).tanh()};
  }
  nn::Linear policy = nullptr, reference = nullptr;
};
// The first stage gives one input to both.
struct first_pair_impl : pair_impl {
  using pair_impl::pair_impl;
  two forward(at::Tensor x) { return pair_impl::forward(x, x); }
};

chevron::stage build_stage(int number) {
  if (number == 0) return std::make_shared<first_pair_impl>(number);
  return std::make_shared<pair_impl>(number);
}

// A sample is a pair of answers, the preferred one first, so that no microbatch parts them: [samples, 2, width]; words: [samples,
// 2].
at::Tensor loss(at::Tensor policy, at::Tensor reference, at::Tensor words) {
  auto const log_probability = [&](at::Tensor const& of) {
    return of.log_softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1);
  };
  at::Tensor const gained = log_probability(policy) - log_probability(reference);
  return -at::log_sigmoid(0.5 * (gained.select(1, 0) - gained.select(1, 1))).mean();
}

int train(int, char**) {
  constexpr auto program =
      chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = micro_batches}>;
  at::set_num_threads(1);
  at::manual_seed(7);
  auto const x = at::randn({16, 2, width}), words = at::randint(width, {16, 2}, at::kLong);
  std::vector<double> losses, plain;

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const sgd = chevron::optimizer<torch::optim::SGD>(0.5);
    chevron::trainer trainer({.program = program, .transport = comm, .stages = build_stage, .loss = loss, .optimizer = sgd});
    for (int step = 0; step < 20; ++step) {
      auto const report = trainer.step(x, words);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    }
  });

  first_pair_impl first(0);
  pair_impl second(1);
  std::vector<at::Tensor> all = first.policy->parameters();
  for (auto const& p : second.policy->parameters()) all.push_back(p);
  torch::optim::SGD sgd(all, 0.5);
  for (int step = 0; step < 20; ++step) {
    double sum = 0;
    sgd.zero_grad(false);
    for (int k = 0; k < micro_batches; ++k) {
      auto const [policy, reference] = first.forward(x.narrow(0, 4 * k, 4));
      auto const [guess, frozen] = second.forward(policy, reference);
      at::Tensor const part = loss(guess, frozen, words.narrow(0, 4 * k, 4));
      (part / micro_batches).backward();
      sum += part.item<double>() / micro_batches;
    }
    sgd.step();
    plain.push_back(sum);
  }
  std::printf("loss %.6f at first, %.6f at last; %s a plain loop\n", losses.front(), losses.back(),
              losses == plain ? "the same in every bit as" : "DIFFERENT from");
  return losses == plain && losses.back() < losses.front() ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
