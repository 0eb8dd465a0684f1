#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <chevron/run/data/stage_loss.hpp>

#include "common/sliced_attention.hpp"
#include "gpt_size.hpp"

/// \file
/// A byte-level GPT, cut into stages.

namespace chevron::train {

/// Draws a module's weights: normal with a deviation of 0.02 for matrices, less for those that write into the residual stream, as
/// in GPT-2. The generator depends on the seed and on the layer alone, so the weights do not depend on how the model is cut.
class weight_source {
 public:
  weight_source(std::uint64_t seed, int layer)
      : generator_(
            at::make_generator<at::CPUGeneratorImpl>(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(layer + 2))) {}

  void draw(torch::nn::Linear& linear, double deviation = 0.02) {
    linear->weight.detach().normal_(0, deviation, generator_);
    if (linear->bias.defined()) linear->bias.detach().zero_();
  }
  void draw(torch::nn::Embedding& table, double deviation = 0.02) { table->weight.detach().normal_(0, deviation, generator_); }

 private:
  at::Generator generator_;
};

/// Several pairs of linear maps with a GELU between them, and a gate that sends each byte to one of them (Switch Transformers,
/// arXiv 2101.03961, sections 2.1 and 2.2). The loss `balance` is 1 where experts get bytes and probability evenly, and more
/// where not.
class experts_impl : public torch::nn::Module {
 public:
  experts_impl(gpt_size const& size, weight_source& source) {
    gate_ = register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(size.width, size.experts).bias(false)));
    source.draw(gate_);
    for (int e = 0; e < size.experts; ++e) {
      std::string const number = "_" + std::to_string(e);
      widen_.push_back(register_module("widen" + number, torch::nn::Linear(size.width, 4 * size.width)));
      narrow_.push_back(register_module("narrow" + number, torch::nn::Linear(4 * size.width, size.width)));
      source.draw(widen_.back());
      source.draw(narrow_.back(), 0.02 / std::sqrt(2.0 * size.layers));
    }
  }

  at::Tensor forward(at::Tensor const& x) {
    at::Tensor const bytes = x.flatten(0, 1), shares = gate_(bytes).softmax(-1, at::kFloat);
    auto const [share, chosen] = shares.max(-1);
    at::Tensor const sent = at::one_hot(chosen, static_cast<std::int64_t>(widen_.size())).to(at::kFloat).mean(0);
    add_loss("balance", static_cast<double>(widen_.size()) * (sent * shares.mean(0)).sum());
    at::Tensor out = at::zeros_like(bytes);
    for (std::size_t e = 0; e < widen_.size(); ++e) {
      at::Tensor const mine = chosen.eq(static_cast<std::int64_t>(e)).nonzero().squeeze(1);
      at::Tensor const made = narrow_[e](at::gelu(widen_[e](bytes.index_select(0, mine))));
      out = out.index_add(0, mine, made * share.index_select(0, mine).unsqueeze(1).to(x.dtype()));
    }
    return out.view_as(x);
  }

 private:
  torch::nn::Linear gate_{nullptr};
  std::vector<torch::nn::Linear> widen_, narrow_;
};
TORCH_MODULE_IMPL(experts, experts_impl);

/// One pre-norm block: attention that sees only earlier bytes, then one or several experts.
class block_impl : public torch::nn::Module {
 public:
  block_impl(gpt_size const& size, std::uint64_t seed, int layer)
      : heads_(size.heads),
        norm_1_(torch::nn::LayerNormOptions({size.width})),
        query_key_value_(torch::nn::LinearOptions(size.width, 3 * size.width).bias(false)),
        project_(torch::nn::LinearOptions(size.width, size.width).bias(false)),
        norm_2_(torch::nn::LayerNormOptions({size.width})) {
    register_module("norm_1", norm_1_);
    register_module("query_key_value", query_key_value_);
    register_module("project", project_);
    register_module("norm_2", norm_2_);
    weight_source source(seed, layer);
    source.draw(query_key_value_);
    double const into_residual = 0.02 / std::sqrt(2.0 * size.layers);
    source.draw(project_, into_residual);
    if (size.experts > 1) {
      experts_ = register_module("experts", experts(size, source));
      return;
    }
    widen_ = register_module("widen", torch::nn::Linear(size.width, 4 * size.width));
    narrow_ = register_module("narrow", torch::nn::Linear(4 * size.width, size.width));
    source.draw(widen_);
    source.draw(narrow_, into_residual);
  }

  /// \param cache keys and values of the slices before
  at::Tensor forward(at::Tensor const& x, slice_cache& cache) {
    auto const samples = x.size(0), length = x.size(1), width = x.size(2);
    // [samples, length, 3, heads, width of a head] -> 3 × [samples, heads, length, width of a head]
    auto const qkv = query_key_value_(norm_1_(x)).view({samples, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
    auto const seen = cache.attend(qkv.select(0, 0), qkv.select(0, 1), qkv.select(0, 2));
    auto const attended = x + project_(seen.transpose(1, 2).reshape({samples, length, width}));
    at::Tensor const normed = norm_2_(attended);
    return attended + (experts_.is_empty() ? narrow_(at::gelu(widen_(normed))) : experts_(normed));
  }

 private:
  std::int64_t heads_;
  torch::nn::LayerNorm norm_1_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear project_;
  torch::nn::LayerNorm norm_2_;
  torch::nn::Linear widen_{nullptr}, narrow_{nullptr};
  experts experts_{nullptr};
};
TORCH_MODULE_IMPL(block, block_impl);

/// One stage: bytes or the previous stage's output in, this one's output or the logits of the next byte out. Of a slice it also
/// takes the position of its first byte, and carries.
class gpt_stage_impl : public torch::nn::Module {
 public:
  /// \param sliced whether it asks for its first byte's position
  gpt_stage_impl(gpt_size const& size, layer_cut const& cut, std::uint64_t seed, bool sliced = false)
      : cut_(cut), sliced_(sliced) {
    if (cut.embeds) {
      weight_source source(seed, -1);
      bytes_ = register_module("bytes", torch::nn::Embedding(vocabulary, size.width));
      positions_ = register_module("positions", torch::nn::Embedding(size.context, size.width));
      source.draw(bytes_);
      source.draw(positions_);
    }
    for (int layer = cut.first; layer < cut.last; ++layer) {
      blocks_.push_back(register_module("layer_" + std::to_string(layer), block(size, seed, layer)));
    }
    if (cut.predicts) {
      norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size.width})));
      head_ = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(size.width, vocabulary).bias(false)));
      weight_source(seed, size.layers).draw(head_);
    }
  }

  /// \param given input; of an embedding over slices, the position of the first byte; carries
  tensors forward(std::span<at::Tensor const> given) {
    at::Tensor x = given[0];
    std::size_t taken = 1;
    if (cut_.embeds) {
      at::Tensor places = at::arange(x.size(1), x.options());
      if (sliced_) places = places + given[taken++];
      x = bytes_(x) + positions_(places);
    }
    slice_cache cache(given.subspan(taken), blocks_.size());
    for (auto& each : blocks_) x = each->forward(x, cache);
    tensors out{cut_.predicts ? head_(norm_(x)) : x};
    out.insert(out.end(), cache.carries().begin(), cache.carries().end());
    return out;
  }

 private:
  layer_cut cut_;
  bool sliced_;
  torch::nn::Embedding bytes_{nullptr};
  torch::nn::Embedding positions_{nullptr};
  std::vector<block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE_IMPL(gpt_stage, gpt_stage_impl);

}  // namespace chevron::train
