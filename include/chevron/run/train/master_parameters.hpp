#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/where.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/train/gradient_place.hpp>
#include <chevron/run/train/optimizer_factory.hpp>

/// \file
/// Float32 copies of half-precision parameters, which the optimizer steps instead of the parameters (mixed-precision training,
/// Micikevicius et al., arXiv 1710.03740, section 3.1).

namespace chevron::detail {

/// A half-precision parameter, or a part of one, and its float32 master.
struct mastered_part {
  at::Tensor parameter;  ///< the whole parameter of a stage
  at::Tensor rounded;    ///< receives the rounded master: the parameter, or a view of a part of its memory
  at::Tensor master;     ///< of the shape of `rounded`
};

/// The float32 masters of a rank's half-precision parameters (`trainer_options::master_parameters`). The optimizer steps a
/// master with the gradient's float32 sum; `round` then rounds the master into the parameter. A master accumulates updates that
/// are each too small to change the parameter. With a sharded optimizer a rank has only the masters of its own share.
class master_parameters {
 public:
  master_parameters() = default;
  /// \param on false: no parameter gets a master \param trained this rank's trained parameters; only those in half precision
  /// get masters
  master_parameters(bool on, std::vector<named_parameter> const& trained) : on_(on) {
    std::vector<mastered_part> all;
    for (named_parameter const& p : trained) {
      if (has(p.value)) all.push_back({p.value, p.value, p.value.detach().to(at::kFloat).requires_grad_()});
    }
    hold(all);
  }
  /// Replaces all masters by those of `parts`, such as the pieces of a share; frees masters that are not among `parts`.
  void hold(std::vector<mastered_part> const& parts) {
    place_.clear();
    parameters_.clear(), rounded_.clear(), masters_.clear();
    for (mastered_part const& one : parts) {
      place_[one.parameter.unsafeGetTensorImpl()] = place_[one.master.unsafeGetTensorImpl()] = parameters_.size();
      parameters_.push_back(one.parameter);
      rounded_.push_back(one.rounded);
      masters_.push_back(one.master);
    }
    note_versions();
  }

  /// Whether a parameter has a master, on this rank or, with a sharded optimizer, on another replica.
  bool has(at::Tensor const& p) const { return on_ && p.requires_grad() && detail::in_float(p); }
  /// The dtype of the tensor that the optimizer steps for a trained parameter, and of the parameter's optimizer state.
  at::ScalarType dtype_of(at::Tensor const& p) const { return has(p) ? at::kFloat : p.scalar_type(); }

  /// The tensor that an unsharded optimizer steps for a parameter: the parameter's master; without a master, the parameter
  /// itself.
  at::Tensor const& stepped(at::Tensor const& p) const {
    auto const found = place_.find(p.unsafeGetTensorImpl());
    return found == place_.end() ? p : masters_[found->second];
  }
  /// Replaces the parameters of a list by their masters, if any: the list for the optimizer's factory and
  /// `before_optimizer_step`.
  std::vector<named_parameter> stepped(std::vector<named_parameter> all) const {
    for (named_parameter& one : all) one.value = stepped(one.value);
    return all;
  }
  /// Returns the parameter of a master; returns any other tensor itself.
  at::Tensor const& parameter_of(at::Tensor const& t) const {
    auto const found = place_.find(t.unsafeGetTensorImpl());
    return found == place_.end() ? t : parameters_[found->second];
  }

  /// The tensor into which a master is rounded: the parameter, or a part of it. Undefined for a tensor that is no master.
  at::Tensor rounded(at::Tensor const& t) const {
    auto const found = place_.find(t.unsafeGetTensorImpl());
    return found != place_.end() && masters_[found->second].is_same(t) ? rounded_[found->second] : at::Tensor();
  }

  /// Rounds the masters into their parameters, and empties the masters' `.grad`, which may be a view of the gradient buffers.
  void round() {
    if (masters_.empty()) return;
    at::NoGradGuard const off;
    at::_foreach_copy_(rounded_, masters_);
    for (at::Tensor const& m : masters_) m.mutable_grad().reset();
    note_versions();
  }

  /// Copies into the masters what the caller has written into parameters since the last rounding (loaded weights, an average):
  /// each element that differs from its rounded master replaces the master. Writes through `.data()` change no version, and are
  /// not noticed.
  void take_changes() {
    at::NoGradGuard const off;
    for (std::size_t k = 0; k < masters_.size(); ++k) {
      if (rounded_[k]._version() == versions_[k]) continue;
      at::Tensor const now = rounded_[k].detach(), before = masters_[k].to(now.scalar_type());
      // Bits are compared, so that an undone step leaves a negative zero as the caller wrote it.
      masters_[k].copy_(at::where(now.view(at::kShort).ne(before.view(at::kShort)), now.to(at::kFloat), masters_[k]));
    }
    note_versions();
  }
  /// \returns the first parameter that was written since the last rounding; undefined if none was
  at::Tensor changed() const {
    for (std::size_t k = 0; k < masters_.size(); ++k) {
      if (rounded_[k]._version() != versions_[k]) return parameters_[k];
    }
    return {};
  }

  /// Sets the master of a parameter whose own values were set before (`load_checkpoint`).
  /// \param p the parameter; if this rank has no master of it, the call does nothing
  /// \param values values for the master, of its shape; undefined: the parameter's values
  void set(at::Tensor const& p, at::Tensor const& values) {
    auto const found = place_.find(p.unsafeGetTensorImpl());
    if (found == place_.end()) return;
    at::NoGradGuard const off;
    masters_[found->second].copy_(values.defined() ? values : rounded_[found->second]);
  }

 private:
  void note_versions() {
    versions_.clear();
    for (at::Tensor const& one : rounded_) versions_.push_back(one._version());
  }

  bool on_ = false;
  std::unordered_map<void const*, std::size_t> place_;  // by parameter and by master: index in the lists below
  tensors parameters_, rounded_, masters_;
  std::vector<std::int64_t> versions_;  // of `rounded_`, at the last rounding
};

}  // namespace chevron::detail
