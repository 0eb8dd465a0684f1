#pragma once

// A stage that is cut over shards in the smallest way, for tests of transports, devices and failures; shard_model.hpp has the
// whole of one.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/stage/stage.hpp>

/// Two weights, of which each shard holds a piece, and one that each has whole but uses on a part of the rows: a reduce-scatter
/// and a gather over the shards in the forward, a gather and a sum in the backward, and a sum of partial gradients in a step.
struct cut_block : torch::nn::Module {
  cut_block(int number, std::int64_t width, chevron::shard_group const& of, at::Device device) : group(of) {
    auto const piece = group.piece(2 * width);
    auto const drawn = [&](std::int64_t dim, std::vector<std::int64_t> sizes) {
      auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 + 2 * number + dim));
      return at::randn(sizes, generator).mul(0.3).narrow(dim, piece.begin, piece.size).clone().to(device);
    };
    columns = register_parameter("columns", drawn(0, {2 * width, width}));
    rows = register_parameter("rows", drawn(1, {width, 2 * width}));
    scale = register_parameter("scale", at::ones({width}).to(device));
    bias = register_parameter("bias", at::zeros({width}).to(device));
  }
  at::Tensor forward(at::Tensor const& x) {
    at::Tensor const part = at::linear(at::linear(group.copy(x), columns).tanh(), rows);
    at::Tensor const mine = group.reduce_scatter(part, 0) * scale;
    return x + group.all_gather(mine, 0, chevron::after_gather::whole, x.size(0)) + bias;
  }

  chevron::shard_group group;
  at::Tensor columns, rows, scale, bias;
};

/// The stage of such a block.
inline chevron::stage build_cut_stage(int number, std::int64_t width, chevron::transport& comm, at::Device device = at::kCPU) {
  chevron::stage out(std::make_shared<cut_block>(number, width, chevron::shard_group(comm), device));
  return out.cut("columns", 0).cut("rows", 1).partial({"scale"});
}
