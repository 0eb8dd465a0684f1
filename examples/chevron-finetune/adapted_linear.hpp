#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "chevron-finetune/adapters.hpp"
#include "common/sharded_layers.hpp"

/// \file
/// Linear maps over shards with a low-rank adapter beside the frozen weight (LoRA: Hu et al., arXiv 2106.09685, section 4.1).

namespace chevron::finetune {

/// One matrix of an adapter, as a module of its own: so its parameter has peft's name, `lora_A.weight`.
class adapter_matrix_impl : public torch::nn::Module {
 public:
  explicit adapter_matrix_impl(at::Tensor values) : weight(register_parameter("weight", std::move(values))) {}
  at::Tensor weight;
};
TORCH_MODULE_IMPL(adapter_matrix, adapter_matrix_impl);

/// A module whose adapter, if it has one, begins with random numbers.
class adapted_module {
 public:
  virtual ~adapted_module() = default;
  /// Draws A from U(-1/√inputs, 1/√inputs), as peft does, and sets B to zero: the model begins as it was. No draw without
  /// adapter.
  /// \param seed of this adapter's own stream, equal for any number of stages, shards and replicas
  virtual void draw(std::uint64_t seed) = 0;
};

/// A column- or row-parallel map, W x, or W x + scale × B A x if it has an adapter. Inputs and outputs of the adapter are cut as
/// those of W: column-parallel maps have A whole and B cut, row-parallel maps have A cut and B whole.
template <class Linear>
class adapted_impl : public Linear, public adapted_module {
  static constexpr bool by_columns = std::is_same_v<Linear, train::column_linear_impl>;

 public:
  /// \param with the model's adapters \param projection this map's name, which decides whether it has an adapter
  adapted_impl(adapters const& with, std::string_view projection, train::shard_layout const& layout, std::int64_t in,
               std::int64_t out, bool with_bias)
      : Linear(layout, in, out, with_bias), layout_(layout), in_(in) {
    if (!with.on(projection)) return;
    scale_ = with.scale();
    std::int64_t const own_in = by_columns ? in : layout.group.piece(in).size;
    std::int64_t const own_out = by_columns ? layout.group.piece(out).size : out;
    narrow_ = this->register_module("lora_A", adapter_matrix(at::zeros({with.rank, own_in})));
    widen_ = this->register_module("lora_B", adapter_matrix(at::zeros({own_out, with.rank})));
  }

  /// \param x as the map without adapter takes it
  at::Tensor forward(at::Tensor const& x) const {
    at::Tensor const mapped = Linear::forward(x);
    if (!narrow_) return mapped;
    at::Tensor narrow = at::linear(x, narrow_->weight);
    if (!by_columns && layout_.group.shards() > 1) narrow = layout_.leave(narrow);
    return mapped + at::linear(narrow, widen_->weight) * scale_;
  }

  void draw(std::uint64_t seed) override {
    if (!narrow_) return;
    at::NoGradGuard const off;
    widen_->weight.zero_();
    double const most = 1 / std::sqrt(static_cast<double>(in_));
    auto const fill = [&](at::Tensor const& all) { all.uniform_(-most, most, at::make_generator<at::CPUGeneratorImpl>(seed)); };
    if (by_columns)
      fill(narrow_->weight);
    else
      train::fill_piece(narrow_->weight, 1, in_, layout_.group, fill);
  }

  train::shard_kinds kinds() const override {
    train::shard_kinds out = Linear::kinds();
    if (!narrow_) return out;
    if (by_columns) {
      out.cut.emplace_back("lora_B.weight", 0);
      out.partial.emplace_back("lora_A.weight");  // each shard's B gives a part of its gradient
    } else {
      out.cut.emplace_back("lora_A.weight", 1);
      if (layout_.cuts_sequence()) out.partial.emplace_back("lora_B.weight");
    }
    return out;
  }

 private:
  train::shard_layout layout_;
  std::int64_t in_;
  double scale_ = 0;
  adapter_matrix narrow_{nullptr}, widen_{nullptr};  // A and B; null: no adapter
};

using adapted_column_impl = adapted_impl<train::column_linear_impl>;
using adapted_row_impl = adapted_impl<train::row_linear_impl>;
TORCH_MODULE_IMPL(adapted_column, adapted_column_impl);
TORCH_MODULE_IMPL(adapted_row, adapted_row_impl);

}  // namespace chevron::finetune
