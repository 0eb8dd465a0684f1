#include <algorithm>
#include <string>
#include <vector>

#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/softmax.h>

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/run/comm/shard_group.hpp>

#include <doctest/doctest.h>

#include "support/gloo_ranks.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

using chevron::after_gather;
using chevron::rank_group;
using chevron::shard_group;
using chevron::tensors;
using chevron::transport;

namespace {

constexpr std::int64_t wide = 6, tokens = 12, experts = 8;

struct grid {
  int ranks = 2, replicas = 2, shards = 1, expert_replicas = 1;
};

/// A mixture of experts: each shard routes its part of the tokens; the ranks of the expert group compute each their experts.
struct mixture : torch::nn::Module {
  shard_group shards, group;
  at::Tensor gate, weights;
  bool balances_own = false;

  mixture(transport& comm, int number) : shards(comm), group(comm, rank_group::experts) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(900 + number));
    gate = register_parameter("gate", at::randn({experts, wide}, generator, at::kDouble));
    at::Tensor const all = at::randn({experts, wide, wide}, generator, at::kDouble) * 0.4;
    auto const own = group.piece(experts);
    weights = register_parameter("weights", all.narrow(0, own.begin, own.size).clone());
  }

  at::Tensor forward(at::Tensor const& x) {
    at::Tensor const mine = shards.scatter(x, 1), rows = mine.reshape({-1, wide});
    at::Tensor const shares = at::softmax(at::linear(rows, gate), -1);
    auto const [share, expert] = shares.max(-1);
    at::Tensor const order = expert.argsort(/*stable=*/true, 0);
    at::Tensor const sorted_experts = expert.index_select(0, order);
    std::vector<std::int64_t> given;
    for (int to = 0; to < group.shards(); ++to) {
      auto const theirs = chevron::piece_of(experts, to, group.shards());
      given.push_back(((expert >= theirs.begin) & (expert < theirs.begin + theirs.size)).sum().item<std::int64_t>());
    }
    auto const counts = group.all_counts(given);
    auto const back = chevron::transposed(counts);
    at::Tensor const came = group.all_to_all(rows.index_select(0, order), counts);
    at::Tensor const whose = group.all_to_all(sorted_experts, counts) - group.piece(experts).begin;
    at::Tensor const made = at::bmm(weights.index_select(0, whose), came.unsqueeze(-1)).squeeze(-1);
    at::Tensor const returned = group.all_to_all(made, back).index_select(0, order.argsort());
    // Of all tokens of the microbatch: from sums over the shards, unless a test leaves them out.
    auto const mean = [&](at::Tensor const& of_mine) {
      at::Tensor const part = of_mine.sum(0) / x.size(0) / x.size(1);
      return balances_own ? part : shards.all_reduce(part);
    };
    chevron::add_loss("balance", experts * (mean(at::one_hot(expert, experts).to(at::kDouble)) * mean(shares)).sum());
    return x + shards.all_gather((returned * share.unsqueeze(-1)).view(mine.sizes()), 1, after_gather::whole, x.size(1));
  }
};

struct outcome {
  std::vector<chevron::step_report> reports;
  std::vector<at::Tensor> whole;  // of this rank's stages: parameters, pieces put together
};

chevron::stage build(transport& comm, int number, bool balances_own) {
  auto const made = std::make_shared<mixture>(comm, number);
  made->balances_own = balances_own;
  return chevron::stage(made).experts("weights").partial({"gate"}).losses({{.name = "balance", .factor = 0.1}});
}

/// \param from, to folders of checkpoints; empty: none
outcome train_on(transport& comm, grid const& of, std::string const& schedule, std::string const& from = "",
                 std::string const& to = "", bool balances_own = false) {
  outcome out;
  auto const program =
      chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = of.ranks, .micro_batches = 4})));
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = [&](int s) { return build(comm, s, balances_own); },
                          .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y, t); },
                          .optimizer = chevron::optimizer<torch::optim::SGD>(0.3),
                          .options = {.clip_grad_norm = 0.4, .on_report = [&](auto const& r) { out.reports.push_back(r); }}});
  if (!from.empty()) chevron::load_checkpoint(train, from);
  for (long k = train.next_step(), end = k + 4; k < end; ++k) {
    auto const generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(10 * k + comm.topology().replica()));
    at::Tensor const input = at::randn({8, tokens, wide}, generator, at::kDouble);
    train.step(input, at::randn({8, tokens, wide}, generator, at::kDouble));
  }
  train.check_copies();
  if (!to.empty()) chevron::save_checkpoint(train, to);
  shard_group const group(comm, rank_group::experts);
  for (auto& s : train.stages()) {
    for (auto const& p : s.parameters())
      out.whole.push_back(p.name == "weights" && group.shards() > 1 ? group.gathered(p.value, 0, experts)
                                                                    : p.value.detach().clone());
  }
  return out;
}

void check_close(std::vector<outcome> const& expected, std::vector<outcome> const& got, grid const& of) {
  CAPTURE(of.shards);
  CAPTURE(of.expert_replicas);
  for (int r = 0; r < of.ranks * of.replicas * of.shards; ++r) {
    CAPTURE(r);
    outcome const &a = expected[static_cast<std::size_t>(r / of.shards)], &b = got[static_cast<std::size_t>(r)];
    REQUIRE(a.whole.size() == b.whole.size());
    for (std::size_t i = 0; i < a.whole.size(); ++i) CHECK((a.whole[i] - b.whole[i]).abs().max().item<double>() <= 1e-9);
    REQUIRE(a.reports.size() == b.reports.size());
    for (std::size_t k = 0; k < a.reports.size(); ++k) {
      CHECK(a.reports[k].loss == doctest::Approx(b.reports[k].loss).epsilon(1e-9));
      CHECK(a.reports[k].grad_norm == doctest::Approx(b.reports[k].grad_norm).epsilon(1e-9));
      CHECK(b.reports[k].grad_norm == got[0].reports[k].grad_norm);
      REQUIRE(b.reports[k].losses.size() == 1);
      CHECK(a.reports[k].losses[0].value == doctest::Approx(b.reports[k].losses[0].value).epsilon(1e-9));
    }
  }
}

std::vector<outcome> on_threads(grid const& of, std::string const& schedule) {
  std::vector<outcome> all(static_cast<std::size_t>(of.ranks * of.replicas * of.shards));
  chevron::run_threads(
      {.pipeline_ranks = of.ranks, .replicas = of.replicas, .shards = of.shards, .expert_replicas = of.expert_replicas},
      [&](transport& comm) { all[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, of, schedule); });
  return all;
}

}  // namespace

TEST_CASE("experts over the shards of one replica, of several, and of all compute what one rank with all experts computes") {
  for (char const* schedule : {"1F1B", "ZB-H1"}) {
    auto const two = on_threads({}, schedule), four = on_threads({.replicas = 4}, schedule);
    for (grid const& of : {grid{.shards = 2}, grid{.expert_replicas = 2}, grid{.shards = 2, .expert_replicas = 2}})
      check_close(two, on_threads(of, schedule), of);
    for (grid const& of : {grid{.replicas = 4, .expert_replicas = 2}, grid{.replicas = 4, .expert_replicas = 4}})
      check_close(four, on_threads(of, schedule), of);
  }
}

TEST_CASE("the same over Gloo") {
  grid const of{.shards = 2, .expert_replicas = 2};
  auto const expected = on_threads({}, "1F1B");
  std::vector<outcome> got(8);
  gloo_ranks::check_all_well(gloo_ranks::on_ranks({2, 2, 0, 2, 2}, gloo_ranks::all_share, [&](chevron::gloo_transport& comm) {
    got[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, of, "1F1B");
  }));
  check_close(expected, got, of);
}

TEST_CASE("a checkpoint holds all experts, and any expert group goes on from it") {
  scratch_folder const folder;
  auto const run = [&](grid const& of, std::string const& from, std::string const& to) {
    std::vector<outcome> all(static_cast<std::size_t>(of.ranks * of.replicas * of.shards));
    chevron::run_threads(
        {.pipeline_ranks = of.ranks, .replicas = of.replicas, .shards = of.shards, .expert_replicas = of.expert_replicas},
        [&](transport& comm) {
          all[static_cast<std::size_t>(comm.topology().global_rank)] =
              train_on(comm, of, "1F1B", from.empty() ? from : (folder.path / from).string(),
                       to.empty() ? to : (folder.path / to).string());
        });
    return all;
  };
  run({}, "", "alone");
  grid const cut{.shards = 2, .expert_replicas = 2};
  run(cut, "", "cut");
  auto const expected = run({}, "alone", "");
  for (std::string const from : {"alone", "cut"}) {
    for (grid const& of : {grid{}, cut, grid{.expert_replicas = 2}, grid{.shards = 4}})
      check_close(expected, run(of, from, ""), of);
  }
}

TEST_CASE("a stage's loss of a shard's own tokens is refused: it counts once") {
  std::string said;
  try {
    chevron::run_threads({.pipeline_ranks = 2, .shards = 2},
                         [](transport& comm) { train_on(comm, {.replicas = 1, .shards = 2}, "1F1B", "", "", true); });
  } catch (chevron::preflight_error const& e) {
    said = e.what();
  }
  CAPTURE(said);
  CHECK(said.find("shards 0 and 1 computed the losses") != std::string::npos);
  CHECK(said.find(" of `balance`, which counts once") != std::string::npos);
}

TEST_CASE("experts that no replicas divide, and a sharded optimizer with experts over several replicas, are refused") {
  CHECK_THROWS_WITH_AS(chevron::run_threads({.replicas = 3, .expert_replicas = 2}, [](transport&) {}),
                       doctest::Contains("experts over 2 replicas: each must be at least 1, and the replicas a multiple"),
                       chevron::usage_error);
  std::string said;
  try {
    chevron::run_threads({.replicas = 2, .expert_replicas = 2}, [](transport& comm) {
      auto const program =
          chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 2})));
      chevron::trainer const train({.program = program,
                                    .transport = comm,
                                    .stages = [&](int s) { return build(comm, s, false); },
                                    .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y, t); },
                                    .optimizer = chevron::optimizer<torch::optim::SGD>(0.3),
                                    .options = {.shard = chevron::sharding::optimizer}});
    });
  } catch (chevron::usage_error const& e) {
    said = e.what();
  }
  CHECK(said.find("a sharded optimizer does not go with experts over 2 replicas") != std::string::npos);
}
