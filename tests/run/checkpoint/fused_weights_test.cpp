// timeout: 300
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <chevron/checkpoint.hpp>

#include <doctest/doctest.h>

#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

namespace fs = std::filesystem;

namespace {

using chevron::shard_group;
using chevron::transport;

constexpr std::int64_t wide = 8, inner = 12, head = 2, queries = 8, keys = 4, tokens = 4;
constexpr int experts = 5, stages = 2;

/// Adam with an eps above rounding errors, which it would make large.
torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(1e-2).eps(1e-3); }

/// Attention with fewer heads of keys than of queries and one weight `[q; k; v]`, then a gated map with one weight `[gate; up]`,
/// then experts that are dealt round robin. Without a group, the whole model in plain LibTorch.
struct layer : torch::nn::Module {
  layer(std::optional<shard_group> of, int number) : group(of) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(40 + number));
    auto const drawn = [&](std::vector<std::int64_t> sizes) { return at::randn(sizes, generator, at::kDouble) * 0.3; };
    auto const rows = [&](at::Tensor const& whole) { return part(whole, 0); };
    at::Tensor const q = drawn({queries * head, wide}), k = drawn({keys * head, wide}), v = drawn({keys * head, wide});
    qkv = register_parameter("qkv", at::cat({rows(q), rows(k), rows(v)}));
    out = register_parameter("out", part(drawn({wide, queries * head}), 1));
    at::Tensor const gate = drawn({inner, wide}), up = drawn({inner, wide});
    gate_up = register_parameter("gate_up", at::cat({rows(gate), rows(up)}));
    gate_up_bias = register_parameter("gate_up_bias", at::cat({rows(drawn({inner})), rows(drawn({inner}))}));
    down = register_parameter("down", part(drawn({wide, inner}), 1));
    router = register_parameter("router", drawn({experts, wide}));
    at::Tensor const all = drawn({experts, wide, wide});
    std::vector<at::Tensor> own;
    for (int e = shard(); e < experts; e += shards()) own.push_back(all[e]);
    expert = register_parameter("expert", own.empty() ? all.narrow(0, 0, 0).clone() : at::stack(own));
  }
  int shards() const { return group ? group->shards() : 1; }
  int shard() const { return group ? group->shard() : 0; }
  at::Tensor enter(at::Tensor const& x) const { return group ? group->copy(x) : x; }
  at::Tensor leave(at::Tensor const& x) const { return group ? group->all_reduce(x) : x; }
  at::Tensor part(at::Tensor const& whole, std::int64_t along) const {
    auto const [begin, size] = chevron::piece_of(whole.size(along), shard(), shards());
    return whole.narrow(along, begin, size).clone();
  }
  at::Tensor forward(at::Tensor x) {
    std::int64_t const samples = x.size(0), own_queries = queries / shards(), own_keys = keys / shards();
    at::Tensor const all = at::linear(enter(x), qkv);
    auto const heads = [&](std::int64_t from, std::int64_t count) {
      at::Tensor const some = all.narrow(2, from * head, count * head).view({samples, tokens, count, head}).transpose(1, 2);
      return some.repeat_interleave(own_queries / count, 1);
    };
    at::Tensor const scores = heads(0, own_queries).matmul(heads(own_queries, own_keys).transpose(2, 3));
    at::Tensor const seen = scores.softmax(-1).matmul(heads(own_queries + own_keys, own_keys));
    x = x + leave(at::linear(seen.transpose(1, 2).flatten(2), out));
    auto const h = at::linear(enter(x), gate_up, gate_up_bias).chunk(2, -1);
    x = x + leave(at::linear(at::silu(h[0]) * h[1], down));
    at::Tensor const shares = enter(at::linear(x, router).softmax(-1)), entered = enter(x);
    at::Tensor sum = at::zeros_like(x);
    for (std::int64_t k = 0; k < expert.size(0); ++k)
      sum = sum + shares.select(2, shard() + k * shards()).unsqueeze(-1) * at::linear(entered, expert[k]).tanh();
    return x + leave(sum);
  }

  std::optional<shard_group> group;
  at::Tensor qkv, out, gate_up, gate_up_bias, down, router, expert;
};

/// The stage of a layer, whose parameters have names of their own in the whole model.
/// \param knows_blocks false: the blocks of `gate_up` are not declared
chevron::stage declared(transport& comm, int number, bool knows_blocks = true) {
  shard_group const group(comm);
  auto const made = std::make_shared<layer>(group, number);
  std::int64_t const T = group.shards();
  chevron::stage of(made);
  of.cut("qkv", 0, {.sizes = {queries / T * head, keys / T * head, keys / T * head}, .whole = (queries + 2 * keys) * head});
  of.cut("gate_up", 0, {.blocks = knows_blocks ? 2 : 1, .whole = 2 * inner}).cut("gate_up_bias", 0, {.blocks = 2});
  of.cut("out", 1).cut("down", 1, {.whole = inner});
  // Of 5 experts the first ranks have one more.
  std::vector<std::int64_t> own;
  for (std::int64_t block = 0; block * T < experts; ++block) own.push_back(block * T + group.shard() < experts ? 1 : 0);
  return of.experts("expert", 0, {.sizes = own, .whole = experts});
}

at::Tensor drawn(long step, std::uint64_t what) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step) * 2 + what);
  return at::randn({4, tokens, wide}, generator, at::kDouble);
}

/// The losses of a plain LibTorch loop.
std::vector<double> plain_losses(int steps) {
  layer first({}, 0), second({}, 1);
  auto all = first.parameters();
  for (at::Tensor const& p : second.parameters()) all.push_back(p);
  torch::optim::AdamW optimizer(all, adamw());
  std::vector<double> out;
  for (int k = 0; k < steps; ++k) {
    optimizer.zero_grad();
    at::Tensor const loss = at::mse_loss(second.forward(first.forward(drawn(k, 0))), drawn(k, 1));
    loss.backward();
    optimizer.step();
    out.push_back(loss.item<double>());
  }
  return out;
}

std::vector<double> train(char const* schedule, int shards, int steps, fs::path const& from, fs::path const& to,
                          fs::path const& weights = "", bool knows_blocks = true) {
  auto const program =
      chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = stages, .micro_batches = 2})));
  std::vector<double> out;
  chevron::run_threads({.pipeline_ranks = stages, .shards = shards}, [&](transport& comm) {
    chevron::trainer trainer({.program = program,
                              .transport = comm,
                              .stages = [&](int s) { return declared(comm, s, knows_blocks); },
                              .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                              .optimizer = chevron::optimizer<torch::optim::AdamW>(adamw())});
    if (!from.empty()) chevron::load_checkpoint(trainer, from);
    for (int k = 0; k < steps; ++k) {
      auto const report = trainer.step(drawn(trainer.next_step(), 0), drawn(trainer.next_step(), 1));
      if (comm.topology().global_rank == 0) out.push_back(report.loss);
    }
    if (!to.empty()) chevron::save_checkpoint(trainer, to);
    if (!weights.empty())
      chevron::save_weights(trainer, weights,
                            [](std::size_t s, std::string const& name) { return "layers." + std::to_string(s) + "." + name; });
  });
  return out;
}

void check_equal(std::vector<double> const& expected, std::size_t from, std::vector<double> const& got) {
  for (std::size_t k = 0; k < got.size(); ++k) CHECK(got[k] == doctest::Approx(expected[from + k]).epsilon(1e-9));
}

}  // namespace

TEST_CASE("fused weights and experts dealt round robin: saved with T shards, resumed with T', the plain loop's model") {
  auto const expected = plain_losses(5);
  for (char const* schedule : {"1F1B", "ZB-H1"}) {
    for (int const shards : {1, 2, 4}) {
      CAPTURE(schedule);
      CAPTURE(shards);
      scratch_folder at, weights;
      check_equal(expected, 0, train(schedule, shards, 3, "", at.path, weights.path));
      for (int const others : {1, 2, 4}) {
        CAPTURE(others);
        check_equal(expected, 3, train(schedule, others, 2, at.path, ""));
      }
      // The whole weights, as Hugging Face's libraries would read them.
      chevron::detail::weight_folder saved(weights.path);
      CHECK(saved.shape("layers.0.gate_up") == std::vector<std::int64_t>{2 * inner, wide});
      CHECK(saved.shape("layers.1.expert") == std::vector<std::int64_t>{experts, wide, wide});
    }
  }
}

TEST_CASE(
    "a checkpoint that was saved without the blocks of a fused weight is refused by shards that know them, and vice versa") {
  for (bool const knew : {false, true}) {
    for (int const others : {1, 2, 4}) {
      scratch_folder at;
      train("1F1B", 2, 1, "", at.path, "", knew);
      std::string said;
      try {
        train("1F1B", others, 1, at.path, "", "", !knew);
      } catch (chevron::checkpoint_error const& e) {
        said = e.what();
      }
      CAPTURE(said);
      CHECK(said.find(
                knew ? "gate_up was saved by shards that cut blocks of 12 + 12 along dimension 0, and is declared as blocks of 24"
                     : "gate_up was saved by shards that cut blocks of 24 along dimension 0, and is declared as blocks of 12 + "
                       "12") != std::string::npos);
    }
  }
}

TEST_CASE("before a step: weights of T shards are those of the plain model, and are loaded by T' shards") {
  layer const plain[] = {{{}, 0}, {{}, 1}};
  for (int const shards : {1, 2, 4}) {
    CAPTURE(shards);
    scratch_folder at, weights;
    train("1F1B", shards, 0, "", at.path, weights.path);
    chevron::detail::weight_folder saved(weights.path);
    for (int s = 0; s < stages; ++s) {
      chevron::safetensors_file const checkpoint(*chevron::last_checkpoint(at.path) /
                                                 ("model-" + std::to_string(s) + ".safetensors"));
      for (auto const& each : plain[s].named_parameters()) {
        CAPTURE(each.key());
        at::Tensor const there = at::zeros_like(each.value().detach());
        saved.copy("layers." + std::to_string(s) + "." + each.key(), there);
        CHECK(there.equal(each.value()));
        CHECK(checkpoint.read(each.key()).equal(each.value()));
      }
    }
    for (int const others : {1, 2, 4}) {
      CAPTURE(others);
      chevron::run_threads({.pipeline_ranks = 1, .shards = others}, [&](transport& comm) {
        auto const program =
            chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = 1})));

        chevron::trainer trainer({.program = program,
                                  .transport = comm,
                                  .stages =
                                      [&](int) {
                                        chevron::stage of = declared(comm, 1);
                                        for (auto const& p : of.parameters()) p.value.detach().zero_();
                                        return of;
                                      },
                                  .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                                  .optimizer = chevron::optimizer<torch::optim::AdamW>(adamw())});
        chevron::load_weights(trainer, weights.path, [](std::size_t, std::string const& name) { return "layers.1." + name; },
                              {.may_stay = {"layers.0.*"}});
        layer const wanted(shard_group(comm), 1);
        for (auto const& p : trainer.stages()[0].parameters()) {
          CAPTURE(p.name);
          CHECK(p.value.equal(wanted.named_parameters()[p.name]));
        }
      });
    }
  }
}

TEST_CASE("blocks that do not add up, and tensors declared twice, are refused where they are declared") {
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    auto const of = [&] { return chevron::stage(std::make_shared<layer>(shard_group(comm), 0)); };
    CHECK_THROWS_WITH_AS(of().cut("gate_up", 0, {.blocks = 5}),
                         doctest::Contains("`gate_up` has 24 elements where it is cut, which are not 5 blocks of one size"),
                         chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().cut("gate_up", 0, {.blocks = 0}), doctest::Contains("not 0 blocks"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().cut("gate_up", 0, {.sizes = {12, 13}}),
                         doctest::Contains("and blocks of 12 + 13 do not add up to them"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().cut("gate_up", 0, {.sizes = {25, -1}}), doctest::Contains("do not add up"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().cut("qkv", 0).cut("qkv", 1),
                         doctest::Contains("`qkv` is declared cut already, and cannot be declared cut"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().cut("qkv", 0).partial({"qkv"}),
                         doctest::Contains("`qkv` is declared cut already, and cannot be declared partial"),
                         chevron::usage_error);
    CHECK_THROWS_WITH_AS(of().partial({"qkv"}).experts("qkv"), doctest::Contains("declared partial already"),
                         chevron::usage_error);
  });
}
