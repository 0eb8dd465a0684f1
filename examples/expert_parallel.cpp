// prints: 10 losses within 1e-6 of those on one rank a stage
// Experts of a mixture on several ranks: two stages, each on two shards of two replicas, whose four ranks hold two experts each.
// docs/guides/meshes.md explains it.
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/one_hot.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

namespace nn = torch::nn;

constexpr int width = 8, count = 8;

struct mixture_impl : nn::Module {
  chevron::shard_group shards;  // divide a microbatch's samples
  chevron::shard_group ranks;   // hold the experts: the shards of all replicas of an expert group
  at::Tensor gate, experts;     // experts: this rank's

  mixture_impl(chevron::transport& comm, int number) : shards(comm), ranks(comm, chevron::rank_group::experts) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number));
    gate = register_parameter("gate", at::randn({count, width}, generator));
    at::Tensor const all = at::randn({count, width, width}, generator) * 0.3;  // the same on all ranks
    auto const [begin, size] = ranks.piece(count);
    experts = register_parameter("experts", all.narrow(0, begin, size).clone());
  }

  // Each sample goes to the expert with the largest share of its gate (Switch Transformers, arXiv 2101.03961).
  at::Tensor forward(at::Tensor x) {
    at::Tensor const mine = shards.scatter(x, 0);  // this shard's samples
    at::Tensor const shares = at::linear(mine, gate).softmax(-1);
    auto const [weight, chosen] = shares.max(-1);
    at::Tensor const order = chosen.argsort(/*stable=*/true, 0);  // by expert, and so by rank
    std::vector<std::int64_t> to_each;
    for (int r = 0; r < ranks.shards(); ++r) {
      auto const [begin, size] = chevron::piece_of(count, r, ranks.shards());
      to_each.push_back((chosen.ge(begin) & chosen.lt(begin + size)).sum().item<std::int64_t>());
    }
    auto const there = ranks.all_counts(to_each), back = chevron::transposed(there);
    at::Tensor const came = ranks.all_to_all(mine.index_select(0, order), there);
    at::Tensor const of = ranks.all_to_all(chosen.index_select(0, order), there) - ranks.piece(count).begin;
    at::Tensor const made = at::bmm(experts.index_select(0, of), came.unsqueeze(2)).squeeze(2).tanh();
    at::Tensor const y = ranks.all_to_all(made, back).index_select(0, order.argsort()) * weight.unsqueeze(1);
    // Of all samples of the microbatch, from the sums over the shards: whole, and equal on all of them.
    auto const mean = [&](at::Tensor const& of_mine) { return shards.all_reduce(of_mine.sum(0)) / x.size(0); };
    at::Tensor const sent = mean(at::one_hot(chosen, count).to(at::kFloat));
    chevron::add_loss("balance", count * (sent * mean(shares)).sum());
    return x + shards.all_gather(y, 0, chevron::after_gather::whole, x.size(0));
  }
};

std::vector<double> losses_over(int shards, int expert_replicas) {
  constexpr auto program = chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 2, .micro_batches = 4}>;
  at::Tensor const x = chevron::seeded(7, [] { return at::randn({2, 32, width}); });
  std::vector<double> losses;
  chevron::run_threads(program, {.replicas = 2, .shards = shards, .expert_replicas = expert_replicas},
                       [&](chevron::transport& comm) {
                         auto const build_stage = [&](int number) {
                           return chevron::stage(std::make_shared<mixture_impl>(comm, number))
                               .experts("experts")
                               .partial({"gate"})
                               .losses({{.name = "balance", .factor = 0.01}});
                         };
                         chevron::trainer trainer({.program = program,
                                                   .transport = comm,
                                                   .stages = build_stage,
                                                   .loss = nn::MSELoss(),
                                                   .optimizer = chevron::optimizer<torch::optim::SGD>(0.1)});
                         at::Tensor const mine = x[comm.topology().replica()];
                         for (int step = 0; step < 10; ++step) {
                           double const loss = trainer.step(mine, mine.flip({1})).loss;
                           if (comm.topology().global_rank == 0) losses.push_back(loss);
                         }
                       });
  return losses;
}

int compare(int, char**) {
  auto const alone = losses_over(1, 1), cut = losses_over(2, 2);
  double largest = 0;
  for (std::size_t k = 0; k < alone.size(); ++k) largest = std::max(largest, std::abs(alone[k] - cut[k]) / alone[k]);
  std::printf("loss %.6f, then %.6f\n10 losses %s those on one rank a stage\n", cut.front(), cut.back(),
              largest <= 1e-6 ? "within 1e-6 of" : "UNLIKE");
  return largest <= 1e-6 ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, compare); }
