#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/view_as_real.h>

#include <chevron/run/core/tensor_fingerprint.hpp>

/// \file
/// Records marks of tensors whose kind, whole or not, is known, so that shards can compare them at the end of a step.

namespace chevron::detail {

/// A number that represents a tensor's values in a comparison over shards.
class tensor_mark {
 public:
  /// A mark without evidence: of an undefined or empty tensor, and of a tensor with an element that is not finite, as an
  /// overflow leaves it.
  constexpr tensor_mark() = default;
  /// \param exact true: a fingerprint of all bits; false: the norm, since on an accelerator equal computations need not
  /// give equal bits
  tensor_mark(at::Tensor const& t, bool exact) {
    if (!t.defined() || t.layout() != at::kStrided || t.is_meta() || t.numel() == 0) return;
    at::NoGradGuard const off;
    bool const has_fractions = at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
    if (!exact && has_fractions) {
      at::Tensor const numbers = t.is_complex() ? at::view_as_real(t.detach()) : t.detach();
      double const norm = at::linalg_vector_norm(numbers, 2, {}, false, at::kDouble).item<double>();
      if (std::isfinite(norm)) bits_ = std::bit_cast<std::int64_t>(norm + std::numeric_limits<double>::min());  // never 0
    } else if (!has_fractions || is_finite(t.detach())) {
      bits_ = static_cast<std::int64_t>(fingerprint(t));
    }
  }
  /// The mark that has these bits, as another shard sent them.
  static tensor_mark of(std::int64_t bits) {
    tensor_mark out;
    out.bits_ = bits;
    return out;
  }

  std::int64_t bits() const { return bits_; }
  bool is_evidence() const { return bits_ != 0; }  ///< false: the mark neither equals nor contradicts another
  /// Whether two marks with evidence stand for equal tensors. \param exact as in the constructor
  bool equals(tensor_mark other, bool exact) const {
    if (exact || bits_ == other.bits_) return bits_ == other.bits_;
    double const a = std::bit_cast<double>(bits_), b = std::bit_cast<double>(other.bits_);
    return std::abs(a - b) <= tolerance * std::abs(a);
  }

  /// The relative difference up to which two norms count as equal on an accelerator.
  static constexpr double tolerance = 1e-3;

 private:
  /// Whether all elements are finite: of any other element the difference from itself is NaN.
  static bool is_finite(at::Tensor const& t) { return (t - t).eq(0).all().item<bool>(); }

  std::int64_t bits_ = 0;
};

/// Whether a tensor repeats itself along a dimension, as if made of equal slices: pieces of such a tensor may be equal by chance.
inline bool is_repetitive(at::Tensor const& t) {
  for (std::int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1 && t.detach().narrow(d, 1, t.size(d) - 1).equal(t.detach().narrow(d, 0, t.size(d) - 1))) return true;
  }
  return false;
}

/// Records tensors of a step of this rank, if it is on:
///
/// - tensors that are whole if collectives are called as shard_group.hpp says: arguments of `copy` and `scatter`, and gradients
///   that arrive at the results of `all_reduce` and of `all_gather` with `after_gather::whole`;
/// - gradients of which each shard computes a part if these collectives are needed, and which are summed next: of the results of
///   `copy`, and of `all_gather` with `after_gather::partial`;
/// - tensors that a stage takes from the stage or the slice before, with the gradients that the stage gives back: if the tensor
///   is whole, which its equality on all shards shows, the gradient has to be whole, too.
///
/// All shards of a stage run the same instructions, so their records have the same order.
class shard_watch {
 public:
  /// The kinds of records.
  enum class kind : std::int64_t { copied, scattered, reduced, gathered, copied_parts, gathered_parts, input, carry };

  struct record {
    kind what;
    int stage, index;      ///< index: of an input or carry
    tensor_mark value;     ///< of an input or carry; otherwise of the tensor that has to be whole
    tensor_mark gradient;  ///< of an input or carry
  };

  /// Begins a step. \param on false: nothing is recorded \param exact see `tensor_mark`
  void begin(bool on, bool exact) {
    on_ = on;
    exact_ = exact;
    records_.clear();
    taken_.clear();
    added_.clear();
  }
  bool on() const { return on_; }
  /// Records nothing until the next call, or records again, without removing records. \returns whether the watch was on
  bool set_on(bool on) { return std::exchange(on_, on); }

  /// Records the tensor of a collective, if the watch is on.
  void note(kind what, at::Tensor const& t) {
    if (!on_) return;
    // Parts must not be equal: bits that are equal prove it on an accelerator, too, and parts of zeros prove nothing.
    bool const of_parts = what == kind::copied_parts || what == kind::gathered_parts;
    bool const is_zero = of_parts && t.defined() && t.count_nonzero().item<std::int64_t>() == 0;
    records_.push_back({what, stage_, 0, is_zero ? tensor_mark() : tensor_mark(t, exact_ || of_parts), {}});
  }
  /// Sets the stage of the collectives that follow, called before each computation.
  void at_stage(int stage) { stage_ = stage; }
  /// Records tensors that the stage's forward takes. \param unit microbatch or slice
  void takes(kind what, int unit, std::span<at::Tensor const> values) {
    int index = 0;
    for (at::Tensor const& t : values) {
      if (!has_gradient(t)) continue;
      // Bits are exact on an accelerator, too: only a tensor that is certainly whole proves anything about its gradient.
      taken_[{what, stage_, unit, index++}] = is_repetitive(t) ? tensor_mark() : tensor_mark(t, true);
    }
  }
  /// Records the gradients that the stage's backward gives back, of the tensors of `takes`.
  void gives(kind what, int unit, std::span<at::Tensor const> gradients) {
    int index = 0;
    for (at::Tensor const& g : gradients) {
      auto const taken = taken_.find({what, stage_, unit, index});
      if (taken != taken_.end()) records_.push_back({what, stage_, index, taken->second, tensor_mark(g, exact_)});
      ++index;
    }
  }
  /// Records a whole parameter that the stage adds over the shards (summed_parameters.hpp).
  void adds(std::string parameter_name) { added_.emplace(stage_, std::move(parameter_name)); }

  std::vector<record> const& records() const { return records_; }
  /// Whether a stage adds a whole parameter over the shards.
  bool added(int stage, std::string const& parameter_name) const { return added_.contains({stage, parameter_name}); }

 private:
  static bool has_gradient(at::Tensor const& t) {
    return t.defined() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
  }

  bool on_ = false, exact_ = true;
  int stage_ = 0;
  std::vector<record> records_;
  std::set<std::pair<int, std::string>> added_;                   // stages and parameters
  std::map<std::tuple<kind, int, int, int>, tensor_mark> taken_;  // by kind, stage, unit and index
};

}  // namespace chevron::detail
