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

#include <chevron/run/stage/stage_loss.hpp>

#include "common/sharded_layers.hpp"
#include "common/sliced_attention.hpp"
#include "gpt_size.hpp"

/// \file
/// A byte-level GPT, cut into stages, and each stage over its shards: heads of attention, the inner width of the maps behind it,
/// and the vocabulary.

namespace chevron::train {

/// Draws a module's weights: normal with a deviation of 0.02 for matrices, less for those that write into the residual stream, as
/// in GPT-2. The generator depends on the seed and on the layer alone, so the weights do not depend on how the model is cut.
class weight_source {
 public:
  weight_source(std::uint64_t seed, int layer)
      : generator_(
            at::make_generator<at::CPUGeneratorImpl>(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(layer + 2))) {}

  /// Of a layer that is cut over shards: the whole is drawn, and each shard keeps its piece.
  template <class Layer>
  void draw(Layer& layer, double deviation = 0.02) {
    layer->fill([&](at::Tensor const& whole) { whole.normal_(0, deviation, generator_); });
  }
  void draw_whole(at::Tensor const& weight) { weight.detach().normal_(0, 0.02, generator_); }

 private:
  at::Generator generator_;
};

/// Several pairs of linear maps with a GELU between them, and a gate that sends each byte to one of them (Switch Transformers,
/// arXiv 2101.03961, sections 2.1 and 2.2). The loss `balance` is 1 where experts get bytes and probability evenly, and more
/// where not.
class experts_impl : public torch::nn::Module {
 public:
  experts_impl(gpt_size const& size, shard_layout const& layout, weight_source& source) : group_(layout.group) {
    gate_ = register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(size.width, size.experts).bias(false)));
    source.draw_whole(gate_->weight);
    for (int e = 0; e < size.experts; ++e) {
      std::string const number = "_" + std::to_string(e);
      // The gate needs whole results, so each expert's leave the cut region by themselves, and whole.
      shard_layout const whole{layout.group};
      widen_.push_back(register_module("widen" + number, column_linear(whole, size.width, 4 * size.width, true)));
      narrow_.push_back(register_module("narrow" + number, row_linear(whole, 4 * size.width, size.width, true)));
      source.draw(widen_.back());
      source.draw(narrow_.back(), 0.02 / std::sqrt(2.0 * size.layers));
    }
  }

  /// \param x whole on each shard
  at::Tensor forward(at::Tensor const& x) {
    at::Tensor const bytes = x.flatten(0, 1), shares = gate_(bytes).softmax(-1, at::kFloat);
    auto const [share, chosen] = shares.max(-1);
    at::Tensor const sent = at::one_hot(chosen, static_cast<std::int64_t>(widen_.size())).to(at::kFloat).mean(0);
    add_loss("balance", static_cast<double>(widen_.size()) * (sent * shares.mean(0)).sum());
    at::Tensor out = at::zeros_like(bytes);
    for (std::size_t e = 0; e < widen_.size(); ++e) {
      at::Tensor const mine = chosen.eq(static_cast<std::int64_t>(e)).nonzero().squeeze(1);
      at::Tensor const made = narrow_[e](at::gelu(widen_[e](group_.copy(bytes.index_select(0, mine)))));
      out = out.index_add(0, mine, made * share.index_select(0, mine).unsqueeze(1).to(x.dtype()));
    }
    return out.view_as(x);
  }

 private:
  shard_group group_;
  torch::nn::Linear gate_{nullptr};
  std::vector<column_linear> widen_;
  std::vector<row_linear> narrow_;
};
TORCH_MODULE_IMPL(experts, experts_impl);

using layer_norm = partly_applied<torch::nn::LayerNormImpl>;

/// One pre-norm block: attention that sees only earlier bytes, then one or several experts.
class block_impl : public torch::nn::Module {
 public:
  block_impl(gpt_size const& size, shard_layout const& layout, std::uint64_t seed, int layer)
      : layout_(layout),
        head_width_(size.width / size.heads),
        norm_1_(layout.cuts_sequence(), torch::nn::LayerNormOptions({size.width})),
        query_key_value_(layout, size.width, size.width, false, 3),
        project_(layout, size.width, size.width, false),
        norm_2_(layout.cuts_sequence(), torch::nn::LayerNormOptions({size.width})) {
    register_module("norm_1", norm_1_);
    register_module("query_key_value", query_key_value_);
    register_module("project", project_);
    register_module("norm_2", norm_2_);
    weight_source source(seed, layer);
    source.draw(query_key_value_);
    double const into_residual = 0.02 / std::sqrt(2.0 * size.layers);
    source.draw(project_, into_residual);
    if (size.experts > 1) {
      experts_ = register_module("experts", experts(size, layout, source));
      return;
    }
    widen_ = register_module("widen", column_linear(layout, size.width, 4 * size.width, true));
    narrow_ = register_module("narrow", row_linear(layout, 4 * size.width, size.width, true));
    source.draw(widen_);
    source.draw(narrow_, into_residual);
  }

  /// \param cache keys and values of the slices before, of this shard's heads
  at::Tensor forward(at::Tensor const& x, slice_cache& cache) {
    at::Tensor const entered = layout_.enter(norm_1_(x));
    auto const samples = entered.size(0), length = entered.size(1);
    // [samples, length, 3, heads, width of a head] -> 3 × [samples, heads, length, width of a head]
    auto const qkv = query_key_value_(entered).view({samples, length, 3, -1, head_width_}).permute({2, 0, 3, 1, 4});
    auto const seen = cache.attend(qkv.select(0, 0), qkv.select(0, 1), qkv.select(0, 2));
    auto const attended = x + project_(seen.transpose(1, 2).reshape({samples, length, -1}));
    at::Tensor const normed = norm_2_(attended);
    if (experts_.is_empty()) return attended + narrow_(at::gelu(widen_(layout_.enter(normed))));
    if (!layout_.cuts_sequence()) return attended + experts_(normed);
    at::Tensor const whole = layout_.group.all_gather(normed, 1, after_gather::whole, layout_.cut_sequence);
    return attended + layout_.group.scatter(experts_(whole), 1);
  }

 private:
  shard_layout layout_;
  std::int64_t head_width_;
  layer_norm norm_1_;
  column_linear query_key_value_;
  row_linear project_;
  layer_norm norm_2_;
  column_linear widen_{nullptr};
  row_linear narrow_{nullptr};
  experts experts_{nullptr};
};
TORCH_MODULE_IMPL(block, block_impl);

/// One stage: bytes or the previous stage's output in, this one's output or the logits of the next byte out, of this shard's
/// piece of the vocabulary. Of a slice it also takes the position of its first byte, and carries.
class gpt_stage_impl : public torch::nn::Module {
 public:
  /// \param sliced whether it asks for its first byte's position
  gpt_stage_impl(gpt_size const& size, layer_cut const& cut, shard_layout const& layout, std::uint64_t seed, bool sliced = false)
      : cut_(cut), layout_(layout), sliced_(sliced) {
    if (cut.embeds) {
      weight_source source(seed, -1);
      bytes_ = register_module("bytes", vocabulary_embedding(layout, vocabulary, size.width));
      torch::nn::EmbeddingOptions const one_for_each(size.context, size.width);
      positions_ = register_module("positions", partly_applied<torch::nn::EmbeddingImpl>(layout.cuts_sequence(), one_for_each));
      source.draw(bytes_);
      source.draw_whole(positions_->weight);
    }
    for (int layer = cut.first; layer < cut.last; ++layer) {
      blocks_.push_back(register_module("layer_" + std::to_string(layer), block(size, layout, seed, layer)));
    }
    if (cut.predicts) {
      norm_ = register_module("norm", layer_norm(layout.cuts_sequence(), torch::nn::LayerNormOptions({size.width})));
      head_ = register_module("head", column_linear(layout, size.width, vocabulary, false));
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
      if (layout_.cuts_sequence()) {
        shard_piece const own = layout_.group.piece(x.size(1));
        places = places.narrow(0, own.begin, own.size);
      }
      x = bytes_(x) + positions_(places);
    }
    slice_cache cache(given.subspan(taken), blocks_.size());
    for (auto& each : blocks_) x = each->forward(x, cache);
    tensors out{cut_.predicts ? head_(layout_.enter(norm_(x))) : x};
    out.insert(out.end(), cache.carries().begin(), cache.carries().end());
    return out;
  }

 private:
  layer_cut cut_;
  shard_layout layout_;
  bool sliced_;
  vocabulary_embedding bytes_{nullptr};
  partly_applied<torch::nn::EmbeddingImpl> positions_{nullptr};
  std::vector<block> blocks_;
  layer_norm norm_{nullptr};
  column_linear head_{nullptr};
};
TORCH_MODULE_IMPL(gpt_stage, gpt_stage_impl);

}  // namespace chevron::train
