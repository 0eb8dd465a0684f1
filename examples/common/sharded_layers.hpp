#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/stage/stage.hpp>

#include "common/ignored_label.hpp"

/// \file
/// Layers whose parameters are cut over the shards of a stage, as Megatron-LM cuts them (Shoeybi et al., arXiv 1909.08053; with a
/// cut sequence Korthikanti et al., arXiv 2205.05198). With one shard each layer computes what LibTorch's layer computes, bit for
/// bit.

namespace chevron::train {

/// How the shards of a stage share a model.
struct shard_layout {
  shard_group group;
  /// Tokens of a sequence that is cut over the shards between blocks, along dimension 1; 0: each shard holds it whole.
  std::int64_t cut_sequence = 0;

  bool cuts_sequence() const { return cut_sequence > 0 && group.shards() > 1; }
  /// From between blocks to column-parallel layers: the whole sequence, whose gradient is added over the shards.
  at::Tensor enter(at::Tensor const& x) const {
    return cuts_sequence() ? group.all_gather(x, 1, after_gather::partial, cut_sequence) : group.copy(x);
  }
  /// From a row-parallel layer to between blocks: the sum over the shards, or this shard's piece of its sequence.
  at::Tensor leave(at::Tensor const& x) const { return cuts_sequence() ? group.reduce_scatter(x, 1) : group.all_reduce(x); }
};

/// How the shards hold the parameters of one module, by their names in it. All others are whole, and so are their gradients.
struct shard_kinds {
  std::vector<std::pair<std::string, std::int64_t>> cut = {};  ///< with the dimension
  std::vector<std::string> partial = {};
};

/// A module that says how shards hold its parameters.
class sharded_module {
 public:
  virtual ~sharded_module() = default;
  virtual shard_kinds kinds() const = 0;
};

/// Declares to a stage what the modules below `model` say of their parameters. With one shard it declares nothing.
inline void declare_shards(stage& to, torch::nn::Module& model, shard_group const& group) {
  if (group.shards() == 1) return;
  for (auto const& each : model.named_modules()) {
    auto const* const one = dynamic_cast<sharded_module const*>(each.value().get());
    if (one == nullptr) continue;
    shard_kinds const kinds = one->kinds();
    auto const full = [&](std::string const& name) { return each.key().empty() ? name : each.key() + "." + name; };
    for (auto const& [name, dimension] : kinds.cut) to.cut(full(name), dimension);
    for (std::string const& name : kinds.partial) to.partial({full(name)});
  }
}

/// Fills this shard's piece of a parameter: `fill` writes the whole tensor, equal for any number of shards.
/// \param size of the whole along `dimension`
template <class Fill>
void fill_piece(at::Tensor const& piece, std::int64_t dimension, std::int64_t size, shard_group const& group, Fill const& fill) {
  at::NoGradGuard const off;
  if (group.shards() == 1) return fill(piece);
  auto sizes = piece.sizes().vec();
  sizes[static_cast<std::size_t>(dimension)] = size;
  at::Tensor const whole = at::empty(sizes, piece.options().requires_grad(false));
  fill(whole);
  shard_piece const mine = group.piece(size);
  piece.copy_(whole.narrow(dimension, mine.begin, mine.size));
}

/// A linear map of which each shard computes its piece of the outputs. It takes what `shard_layout::enter` gives: one entered
/// tensor serves several of them. Weights are not drawn.
class column_linear_impl : public torch::nn::Module, public sharded_module {
 public:
  /// \param maps so many maps of `out` outputs each, in one weight [maps, out, in], of which each is cut; 1: the weight is
  /// [out, in]. A bias needs one map.
  column_linear_impl(shard_layout const& layout, std::int64_t in, std::int64_t out, bool with_bias, std::int64_t maps = 1)
      : group_(layout.group), out_(out) {
    std::int64_t const own = group_.piece(out).size;
    weight = register_parameter("weight", maps == 1 ? at::empty({own, in}) : at::empty({maps, own, in}));
    if (with_bias) bias = register_parameter("bias", at::zeros({own}));
  }
  at::Tensor forward(at::Tensor const& x) const {
    return torch::nn::functional::linear(x, weight.dim() == 2 ? weight : weight.flatten(0, 1), bias);
  }
  template <class Fill>
  void fill(Fill const& with) {
    fill_piece(weight, weight.dim() - 2, out_, group_, with);
  }
  shard_kinds kinds() const override {
    shard_kinds out{.cut = {{"weight", weight.dim() - 2}}};
    if (bias.defined()) out.cut.emplace_back("bias", 0);
    return out;
  }

  at::Tensor weight, bias;  // bias: undefined where there is none

 private:
  shard_group group_;
  std::int64_t out_;
};
TORCH_MODULE_IMPL(column_linear, column_linear_impl);

/// A linear map of which each shard has its piece of the inputs, as column-parallel maps give them. Its result has left the cut
/// region (`shard_layout::leave`). Weights are not drawn.
class row_linear_impl : public torch::nn::Module, public sharded_module {
 public:
  row_linear_impl(shard_layout const& layout, std::int64_t in, std::int64_t out, bool with_bias) : layout_(layout), in_(in) {
    weight = register_parameter("weight", at::empty({out, layout_.group.piece(in).size}));
    if (with_bias) bias = register_parameter("bias", at::zeros({out}));
  }
  at::Tensor forward(at::Tensor const& x) const {
    if (layout_.group.shards() == 1) return torch::nn::functional::linear(x, weight, bias);
    at::Tensor const sum = layout_.leave(torch::nn::functional::linear(x, weight));
    return bias.defined() ? sum + bias : sum;
  }
  template <class Fill>
  void fill(Fill const& with) {
    fill_piece(weight, 1, in_, layout_.group, with);
  }
  shard_kinds kinds() const override {
    shard_kinds out{.cut = {{"weight", 1}}};
    if (bias.defined() && layout_.cuts_sequence()) out.partial.emplace_back("bias");
    return out;
  }

  at::Tensor weight, bias;  // bias: undefined where there is none

 private:
  shard_layout layout_;
  std::int64_t in_;
};
TORCH_MODULE_IMPL(row_linear, row_linear_impl);

/// An embedding whose rows, tokens of a vocabulary, are cut over the shards: each looks up its own, and gives zeros for others.
/// Rows are not drawn.
class vocabulary_embedding_impl : public torch::nn::Module, public sharded_module {
 public:
  /// \param padding a token whose row gets no gradient; from the end where negative
  vocabulary_embedding_impl(shard_layout const& layout, std::int64_t vocabulary_size, std::int64_t width,
                            std::optional<std::int64_t> padding = std::nullopt)
      : layout_(layout), vocabulary_(vocabulary_size), own_(layout.group.piece(vocabulary_size)) {
    weight = register_parameter("weight", at::empty({own_.size, width}));
    if (!padding) return;
    std::int64_t const row = *padding + (*padding < 0 ? vocabulary_size : 0) - own_.begin;
    if (row >= 0 && row < own_.size) padding_ = row;
  }
  /// \param tokens [samples, length] \returns [samples, length, width], or this shard's piece of a cut sequence
  at::Tensor forward(at::Tensor const& tokens) const {
    if (layout_.group.shards() == 1) return at::embedding(weight, tokens, padding_);
    at::Tensor const rows = tokens - own_.begin, others = rows.lt(0).logical_or_(rows.ge(own_.size));
    at::Tensor const found = at::embedding(weight, rows.masked_fill(others, 0), padding_);
    return layout_.leave(found.masked_fill(others.unsqueeze(-1), 0));
  }
  template <class Fill>
  void fill(Fill const& with) {
    fill_piece(weight, 0, vocabulary_, layout_.group, with);
  }
  shard_kinds kinds() const override { return {.cut = {{"weight", 0}}}; }

  at::Tensor weight;

 private:
  shard_layout layout_;
  std::int64_t vocabulary_;
  shard_piece own_;
  std::int64_t padding_ = -1;  // of this shard's rows; -1: none
};
TORCH_MODULE_IMPL(vocabulary_embedding, vocabulary_embedding_impl);

/// A module that each shard holds whole, such as a norm. Where `parts` says so, each shard applies it to a part of the input
/// alone, to its piece of a cut sequence or to its own heads, and gradients of its parameters are partial.
template <class Module>
class partly_applied_impl : public Module, public sharded_module {
 public:
  template <class... Arguments>
  explicit partly_applied_impl(bool parts, Arguments&&... arguments)
      : Module(std::forward<Arguments>(arguments)...), parts_(parts) {}
  shard_kinds kinds() const override {
    shard_kinds out;
    for (auto const& each : this->named_parameters()) {
      if (parts_) out.partial.push_back(each.key());
    }
    return out;
  }

 private:
  bool parts_;
};
template <class Module>
using partly_applied = torch::nn::ModuleHolder<partly_applied_impl<Module>>;

/// The mean cross-entropy of logits that are cut over the vocabulary, equal on all shards bit for bit; with one shard it is
/// LibTorch's.
/// \param logits [rows, this shard's piece of the vocabulary]
/// \param targets [rows], of the whole vocabulary; the mean is over rows whose target is not `ignored_label`, NaN without any
inline at::Tensor vocabulary_cross_entropy(shard_group const& group, at::Tensor const& logits, at::Tensor const& targets,
                                           std::int64_t vocabulary_size) {
  if (group.shards() == 1) return at::cross_entropy_loss(logits, targets);
  shard_piece const own = group.piece(vocabulary_size);
  at::Tensor const highest = group.gathered(logits.detach().amax(-1, true), 1, group.shards()).amax(-1, true);
  at::Tensor const shifted = logits - highest;
  at::Tensor const sum = group.all_reduce(shifted.exp().sum(-1));
  at::Tensor const rows = targets - own.begin, others = rows.lt(0).logical_or_(rows.ge(own.size));
  at::Tensor const found = shifted.gather(-1, rows.masked_fill(others, 0).unsqueeze(-1)).squeeze(-1);
  at::Tensor const ignored = targets.eq(ignored_label);
  at::Tensor const losses = (sum.log() - group.all_reduce(found.masked_fill(others, 0))).masked_fill(ignored, 0);
  return losses.sum() / ignored.logical_not().sum();
}

}  // namespace chevron::train
