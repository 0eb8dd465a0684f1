#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/mse_loss.h>

#include <doctest/doctest.h>

#include "support/small_model.hpp"

namespace {

/// A module of two parameters over one memory of 12 elements.
struct over_one_memory : torch::nn::Module {
  at::Tensor a, b;
  explicit over_one_memory(std::vector<at::Tensor> const& two) {
    a = register_parameter("a", two[0]);
    b = register_parameter("b", two[1]);
  }
  at::Tensor forward(at::Tensor const& x) { return x * a.sum() + b.sum(); }
};

/// Constructs a trainer with two replicas. \returns the error's words; empty: none
std::string words_of(std::vector<at::Tensor> (*make)(at::Tensor), chevron::sharding shard) {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 1})));
  try {
    chevron::run_threads({.replicas = 2}, [&](chevron::transport& comm) {
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = [&](int) { return std::make_shared<over_one_memory>(make(at::ones({12}))); },
                              .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y, t); },
                              .optimizer = chevron::optimizer<torch::optim::SGD>(0.01),
                              .options = {.shard = shard, .when_same_batch = chevron::same_batch::allow}});
      train.step(at::ones({2, 3}), at::zeros({2, 3}));
    });
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a sharded optimizer refuses parameters with an element in common, and steps interleaved ones") {
  using chevron::sharding;
  auto const overlapping = [](at::Tensor t) { return std::vector{t.narrow(0, 0, 5), t.narrow(0, 4, 8)}; };
  auto const crossing = [](at::Tensor t) { return std::vector{t.view({3, 4}).select(1, 2), t.narrow(0, 5, 4)}; };
  auto const aliases = [](at::Tensor t) { return std::vector{t, t.view({3, 4})}; };
  for (sharding const shard : {sharding::optimizer, sharding::gradients}) {
    for (auto const make : {+overlapping, +crossing, +aliases}) {
      std::string const said = words_of(make, shard);
      CAPTURE(said);
      CHECK(said.find("stage 0's a and stage 0's b have elements in common") != std::string::npos);
      CHECK(said.find("Remedy: parameters with memory of their own") != std::string::npos);
    }
  }
  CHECK(words_of(overlapping, sharding::nothing) == "");
  auto const interleaved = [](at::Tensor t) { return std::vector{t.view({6, 2}).select(1, 0), t.view({6, 2}).select(1, 1)}; };
  auto const side_by_side = [](at::Tensor t) { return std::vector{t.narrow(0, 0, 5), t.narrow(0, 5, 7)}; };
  auto const one = [](at::Tensor t) { return std::vector{t, t}; };
  for (auto const make : {+interleaved, +side_by_side, +one}) CHECK(words_of(make, sharding::optimizer) == "");
}
