#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Causal attention over the slices of a sequence, whose keys and values stages carry: each slice's once, without a copy that
/// grows from slice to slice.

namespace chevron::train {

/// Keys or values for each query's head, where several queries share one (Ainslie et al., 2023).
/// \param t [samples, heads of keys, length, width of a head]
inline at::Tensor for_each_query(at::Tensor const& t, std::int64_t heads) {
  if (t.size(1) == heads) return t;
  return t.unsqueeze(2)
      .expand({t.size(0), t.size(1), heads / t.size(1), t.size(2), t.size(3)})
      .reshape({t.size(0), heads, t.size(2), t.size(3)});
}

/// Attention of a slice's queries to the slices before, whole, and to their own, causally. Each slice is attended to alone; with
/// the logarithms of their sums of exponentials the results make one (Ring Attention, Liu et al., arXiv 2310.01889, section 3).
/// In the backward each slice gets its gradients from the whole output and sum. On the CPU, by LibTorch's flash attention.
struct sliced_attention : torch::autograd::Function<sliced_attention> {
  /// \param keys_values keys and values by slice, the queries' own last
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor const& queries, at::TensorList keys_values) {
    tensors outs, sums;
    for (std::size_t i = 0; i < keys_values.size(); i += 2) {
      bool const own = i + 2 == keys_values.size();
      auto [out, sum] =
          at::_scaled_dot_product_flash_attention_for_cpu(queries, for_each_query(keys_values[i], queries.size(1)),
                                                          for_each_query(keys_values[i + 1], queries.size(1)), 0.0, own);
      outs.push_back(std::move(out));
      sums.push_back(std::move(sum));
    }
    at::Tensor const whole = at::logsumexp(at::stack(sums), 0);
    at::Tensor mixed;
    for (std::size_t i = 0; i < outs.size(); ++i) {
      at::Tensor const part = outs[i] * (sums[i] - whole).exp().unsqueeze(-1);
      mixed = mixed.defined() ? mixed.add_(part) : part;
    }
    mixed = mixed.to(queries.scalar_type());
    tensors kept{queries, mixed, whole};
    kept.insert(kept.end(), keys_values.begin(), keys_values.end());
    context->save_for_backward(std::move(kept));
    return mixed;
  }
  static tensors backward(torch::autograd::AutogradContext* context, tensors const& gradients) {
    tensors const kept = context->get_saved_variables();
    at::Tensor const &queries = kept[0], &mixed = kept[1], &whole = kept[2];
    tensors out(1);
    for (std::size_t i = 3; i < kept.size(); i += 2) {
      bool const own = i + 2 == kept.size();
      auto const [of_queries, of_keys, of_values] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradients[0], queries, for_each_query(kept[i], queries.size(1)), for_each_query(kept[i + 1], queries.size(1)), mixed,
          whole, 0.0, own);
      out[0] = out[0].defined() ? out[0] + of_queries : of_queries;
      for (at::Tensor const& one : {of_keys, of_values}) {
        bool const shared = one.size(1) != kept[i].size(1);
        out.push_back(shared ? one.unflatten(1, {kept[i].size(1), -1}).sum(2) : one);
      }
    }
    return out;
  }
};

/// A stage's keys and values of the slices before, by layer, while it runs one slice.
class slice_cache {
 public:
  /// \param carries of the stage, as `names` has them: undefined ones are of slices to come
  /// \param layers of the stage
  /// \param positions [samples, length], each token's position in its document, of which it sees the earlier tokens alone;
  /// undefined: a token sees all earlier tokens
  slice_cache(std::span<at::Tensor const> carries, std::size_t layers, at::Tensor positions = {})
      : carries_(carries.begin(), carries.end()),
        of_layer_(layers == 0 ? 0 : carries.size() / layers),
        positions_(std::move(positions)) {}

  /// The carries of a stage of so many layers: of each layer, keys and values of all slices but the last.
  static std::vector<stage_carry> names(int layers, int slices) {
    std::vector<stage_carry> out;
    for (int layer = 0; layer < layers; ++layer) {
      for (int slice = 0; slice + 1 < slices; ++slice) {
        for (char const* what : {"keys", "values"})
          out.push_back({what + std::string("_") + std::to_string(layer) + "_of_slice_" + std::to_string(slice)});
      }
    }
    return out;
  }

  /// Attention of the next layer, which sees this slice up to each query, and the slices before. Notes the slice's keys and
  /// values.
  /// \param queries [samples, heads, length, width of a head]; keys and values may have fewer heads
  at::Tensor attend(at::Tensor queries, at::Tensor keys, at::Tensor const& values) {
    // Norms of heads return float32 under autocast, which casts what PyTorch's own attention is given.
    queries = queries.to(values.scalar_type());
    keys = keys.to(values.scalar_type());
    std::size_t const first = of_layer_ * layer_++;
    tensors seen;
    std::size_t next = first;
    for (; next < first + of_layer_ && carries_[next].defined(); ++next) seen.push_back(carries_[next]);
    if (next < first + of_layer_) {
      carries_[next] = keys;
      carries_[next + 1] = values;
    }
    std::int64_t const heads = queries.size(1);
    if (seen.empty() && !positions_.defined()) {
      return at::scaled_dot_product_attention(queries, for_each_query(keys, heads), for_each_query(values, heads), {}, 0.0,
                                              /*is_causal=*/true);
    }
    seen.push_back(keys);
    seen.push_back(values);
    if (queries.is_cpu() && !positions_.defined()) return sliced_attention::apply(queries, at::TensorList(seen));
    // Otherwise all in one, under a mask.
    tensors all_keys, all_values;
    for (std::size_t i = 0; i < seen.size(); i += 2) {
      all_keys.push_back(seen[i]);
      all_values.push_back(seen[i + 1]);
    }
    at::Tensor const each_key = for_each_query(at::cat(all_keys, 2), heads),
                     each_value = for_each_query(at::cat(all_values, 2), heads);
    return at::scaled_dot_product_attention(queries, each_key, each_value, visible(queries, each_key.size(2)));
  }

  /// Tokens of the slices before, as the next layer has them.
  std::int64_t length() const {
    std::int64_t sum = 0;
    for (std::size_t i = of_layer_ * layer_; i < of_layer_ * (layer_ + 1) && carries_[i].defined(); i += 2)
      sum += carries_[i].size(2);
    return sum;
  }
  /// Each token's position in its document; undefined if a token sees all earlier ones.
  at::Tensor const& positions() const { return positions_; }
  /// For the next slice.
  tensors const& carries() const { return carries_; }

 private:
  /// Which keys each query sees: [own, all], or with positions [samples, 1, own, all]; the same in all layers.
  at::Tensor const& visible(at::Tensor const& queries, std::int64_t all) {
    if (visible_.defined()) return visible_;
    std::int64_t const own = queries.size(2);
    visible_ = at::ones({own, all}, queries.options().dtype(at::kBool)).tril(all - own);
    if (!positions_.defined()) return visible_;
    // A document begins as many tokens before a query as the query's position says.
    auto const numbers = positions_.options();
    at::Tensor const begins = at::arange(all - own, all, numbers) - positions_;
    visible_ = visible_.logical_and(at::arange(all, numbers).ge(begins.unsqueeze(-1))).unsqueeze(1);
    return visible_;
  }

  tensors carries_;
  std::size_t of_layer_;  // carries of a layer
  at::Tensor positions_, visible_;
  std::size_t layer_ = 0;
};

}  // namespace chevron::train
