#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "chevron-finetune/adapted_linear.hpp"
#include "chevron-finetune/decoder_config.hpp"
#include "common/sharded_layers.hpp"
#include "common/sliced_attention.hpp"

/// \file
/// A decoder of Llama's kind in plain LibTorch, cut into stages, and each stage over its shards: heads of attention, the inner
/// width of gated maps, and the vocabulary. Modules have the names that Hugging Face gives them, so that a folder of weights
/// needs no name map. Weights are not drawn: they are to be loaded. With adapters all other parameters are frozen.

namespace chevron::finetune {

/// x over its root mean square, times a weight; in float whatever x is (Zhang and Sennrich, 2019).
class rms_norm_impl : public torch::nn::Module {
 public:
  rms_norm_impl(std::int64_t width, double epsilon)
      : weight_(register_parameter("weight", at::ones({width}))), epsilon_(epsilon) {}

  at::Tensor forward(at::Tensor const& x) {
    at::Tensor const wide = x.to(at::kFloat);
    at::Tensor const normed = wide * at::rsqrt(wide.pow(2).mean(-1, true) + epsilon_);
    return weight_ * normed.to(x.scalar_type());
  }

 private:
  at::Tensor weight_;
  double epsilon_;
};
/// Partly applied: to a piece of the sequence, or to a shard's heads.
using rms_norm = train::partly_applied<rms_norm_impl>;

/// Rotary position embedding (Su et al., 2021): each pair of numbers of a head is turned by an angle that grows with the
/// position. Pairs are halves apart, as Hugging Face stores weights.
class rotary {
 public:
  explicit rotary(decoder_config const& c) {
    at::Tensor const steps = at::arange(0, c.head_width, 2, at::kFloat) / static_cast<double>(c.head_width);
    frequencies_ = 1.0 / at::pow(at::Scalar(c.rope_theta), steps);
    if (c.stretched) stretch(*c.stretched);
  }

  /// \param x [samples, heads, length, width of a head]
  /// \param positions of the tokens: [length], or [samples, length] if each sample has its own
  at::Tensor turned(at::Tensor const& x, at::Tensor const& positions) const {
    at::Tensor const half = positions.to(at::kFloat).unsqueeze(-1) * frequencies_.to(x.device());
    at::Tensor const turn = at::cat({half, half}, -1), angles = positions.dim() == 2 ? turn.unsqueeze(1) : turn;
    auto const halves = x.chunk(2, -1);
    return x * angles.cos().to(x.scalar_type()) + at::cat({-halves[1], halves[0]}, -1) * angles.sin().to(x.scalar_type());
  }

 private:
  /// Waves longer than the original text are stretched, short ones are not, and between them there is a slope.
  void stretch(stretched_rope const& by) {
    at::Tensor const lengths = frequencies_.reciprocal() * (2 * std::numbers::pi);
    at::Tensor const turns = lengths.reciprocal() * by.original_context;  // in the original text
    at::Tensor const slope = ((turns - by.low) / (by.high - by.low)).clamp(0, 1);
    frequencies_ = (1 - slope) * frequencies_ / by.factor + slope * frequencies_;
  }

  at::Tensor frequencies_;
};

/// Attention that sees only earlier tokens; several queries share a key (Ainslie et al., 2023). A shard has its piece of the
/// keys' heads, and the queries' heads that share them.
class attention_impl : public torch::nn::Module {
 public:
  attention_impl(decoder_config const& c, train::shard_layout const& layout, adapters const& with)
      : head_width_(c.head_width),
        rotary_(c),
        query_(register_module("q_proj", adapted_column(with, "q_proj", layout, c.width, c.heads * c.head_width, c.query_bias))),
        key_(
            register_module("k_proj", adapted_column(with, "k_proj", layout, c.width, c.key_heads * c.head_width, c.query_bias))),
        value_(
            register_module("v_proj", adapted_column(with, "v_proj", layout, c.width, c.key_heads * c.head_width, c.query_bias))),
        output_(register_module("o_proj", adapted_row(with, "o_proj", layout, c.heads * c.head_width, c.width, c.output_bias))) {
    if (!c.head_norms) return;
    bool const own_heads = layout.group.shards() > 1;
    query_norm_ = register_module("q_norm", rms_norm(own_heads, c.head_width, c.norm_epsilon));
    key_norm_ = register_module("k_norm", rms_norm(own_heads, c.head_width, c.norm_epsilon));
  }

  /// \param x entered (`shard_layout::enter`) \param cache keys and values of the slices before
  at::Tensor forward(at::Tensor const& x, train::slice_cache& cache) {
    auto const samples = x.size(0), length = x.size(1), start = cache.length();
    auto const in_heads = [&](at::Tensor const& all, rms_norm norm = nullptr) {
      at::Tensor const cut = all.view({samples, length, -1, head_width_});
      return (norm ? norm(cut) : cut).transpose(1, 2);
    };
    at::Tensor const& of_documents = cache.positions();
    at::Tensor const positions = of_documents.defined()
                                     ? of_documents
                                     : at::arange(start, start + length, at::TensorOptions(at::kLong).device(x.device()));
    auto const queries = rotary_.turned(in_heads(query_(x), query_norm_), positions);
    auto const keys = rotary_.turned(in_heads(key_(x), key_norm_), positions);
    auto const seen = cache.attend(queries, keys, in_heads(value_(x)));
    return output_(seen.transpose(1, 2).reshape({samples, length, -1}));
  }

 private:
  std::int64_t head_width_;
  rotary rotary_;
  adapted_column query_, key_, value_;
  adapted_row output_;
  rms_norm query_norm_{nullptr}, key_norm_{nullptr};
};
TORCH_MODULE_IMPL(attention, attention_impl);

/// SwiGLU (Shazeer, 2020): one map gates another.
class gated_maps_impl : public torch::nn::Module {
 public:
  gated_maps_impl(decoder_config const& c, train::shard_layout const& layout, adapters const& with)
      : gate_(register_module("gate_proj", adapted_column(with, "gate_proj", layout, c.width, c.inner, c.inner_bias))),
        up_(register_module("up_proj", adapted_column(with, "up_proj", layout, c.width, c.inner, c.inner_bias))),
        down_(register_module("down_proj", adapted_row(with, "down_proj", layout, c.inner, c.width, c.inner_bias))) {}

  /// \param x entered (`shard_layout::enter`)
  at::Tensor forward(at::Tensor const& x) { return down_(at::silu(gate_(x)) * up_(x)); }

 private:
  adapted_column gate_, up_;
  adapted_row down_;
};
TORCH_MODULE_IMPL(gated_maps, gated_maps_impl);

class decoder_layer_impl : public torch::nn::Module {
 public:
  decoder_layer_impl(decoder_config const& c, train::shard_layout const& layout, adapters const& with)
      : layout_(layout),
        attention_(register_module("self_attn", attention(c, layout, with))),
        maps_(register_module("mlp", gated_maps(c, layout, with))),
        before_attention_(register_module("input_layernorm", rms_norm(layout.cuts_sequence(), c.width, c.norm_epsilon))),
        before_maps_(register_module("post_attention_layernorm", rms_norm(layout.cuts_sequence(), c.width, c.norm_epsilon))) {}

  at::Tensor forward(at::Tensor const& x, train::slice_cache& cache) {
    at::Tensor const attended = x + attention_->forward(layout_.enter(before_attention_(x)), cache);
    return attended + maps_(layout_.enter(before_maps_(attended)));
  }

 private:
  train::shard_layout layout_;
  attention attention_;
  gated_maps maps_;
  rms_norm before_attention_, before_maps_;
};
TORCH_MODULE_IMPL(decoder_layer, decoder_layer_impl);

/// Modules below a name of their own; it is never called itself.
class module_group_impl : public torch::nn::Module {};
TORCH_MODULE_IMPL(module_group, module_group_impl);

/// One stage: tokens or the previous stage's output in, this one's output or the next token's logits out, of this shard's piece
/// of the vocabulary; and its carries from slice to slice.
class decoder_stage_impl : public torch::nn::Module {
 public:
  /// \param packed whether the forward is given positions: each token sees its own document alone, where it has this position
  /// \param with adapters, beside which everything else is frozen; of rank 0: none, and everything is trained
  decoder_stage_impl(decoder_config const& c, train::layer_cut const& cut, train::shard_layout const& layout, bool packed = false,
                     adapters const& with = {})
      : cut_(cut), layout_(layout), packed_(packed) {
    build(c, with);
    if (with.rank == 0) return;
    for (auto& each : named_parameters()) each.value().requires_grad_(is_of_adapter(each.key()));
  }

  /// \param given input, positions [samples, length] if samples are packed and, of slices, carries
  tensors forward(std::span<at::Tensor const> given) {
    at::Tensor x = cut_.embeds ? embedding_(given[0]) : given[0];
    train::slice_cache cache(given.subspan(packed_ ? 2 : 1), layers_.size(), packed_ ? given[1] : at::Tensor());
    for (decoder_layer& each : layers_) x = each->forward(x, cache);
    if (cut_.predicts) {
      x = layout_.enter(norm_(x));
      x = head_ ? head_(x) : at::linear(x, embedding_->weight);
    }
    tensors out{x};
    out.insert(out.end(), cache.carries().begin(), cache.carries().end());
    return out;
  }

  /// What a tie of embedding and head over two stages names; empty: this stage has neither.
  std::string tied_name() const { return cut_.embeds ? "model.embed_tokens.weight" : cut_.predicts ? "lm_head.weight" : ""; }

 private:
  void build(decoder_config const& c, adapters const& with) {
    module_group model(nullptr);
    if (cut_.embeds || cut_.last > cut_.first || cut_.predicts) model = register_module("model", module_group());
    if (cut_.embeds) {
      embedding_ = model->register_module("embed_tokens", train::vocabulary_embedding(layout_, c.vocabulary, c.width, c.padding));
    }
    if (cut_.last > cut_.first) {
      auto layers = model->register_module("layers", module_group());
      for (int layer = cut_.first; layer < cut_.last; ++layer)
        layers_.push_back(layers->register_module(std::to_string(layer), decoder_layer(c, layout_, with)));
    }
    if (!cut_.predicts) return;
    norm_ = model->register_module("norm", rms_norm(layout_.cuts_sequence(), c.width, c.norm_epsilon));
    if (c.tied && cut_.embeds) {
      // One stage has both: a folder may hold either name.
      register_module("lm_head", module_group())->register_parameter("weight", embedding_->weight);
      return;
    }
    head_ = register_module("lm_head", train::column_linear(layout_, c.width, c.vocabulary, false));
  }

  train::layer_cut cut_;
  train::shard_layout layout_;
  bool packed_;
  train::vocabulary_embedding embedding_{nullptr};
  std::vector<decoder_layer> layers_;
  rms_norm norm_{nullptr};
  train::column_linear head_{nullptr};
};
TORCH_MODULE_IMPL(decoder_stage, decoder_stage_impl);

}  // namespace chevron::finetune
