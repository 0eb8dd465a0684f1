#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <chevron/run/comm/replica_collective.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/gradient_norm.hpp>

/// \file
/// Where a stage's gradients live, and their sum over the replicas.

namespace chevron {

/// The gradients of one stage's parameters, as views into one flat buffer per dtype and device, so that zeroing, scaling and
/// summing over replicas handle few large pieces. Parameters that need no gradient have none here. Gradients of half-precision
/// parameters are added up, and summed over replicas, in single precision.
///
/// The buffers are made once. W and B add into them through the parameters' `.grad` (in half precision: each gradient is added as
/// soon as it is there, and `.grad` is left empty); `start_sums` hands them to the transport in buckets, once the stage's
/// last W or B is done, and nobody writes to them until `wait_sums` returned.
class gradient_buckets {
 public:
  /// \param first_bucket buckets are numbered over the whole rank; this stage's begin here
  /// \param bucket_bytes largest size of a bucket; a bucket may hold several parameters, or a part of one
  /// \param sharded each replica steps its share of the parameters (`cut` says which), and gets the sums of that share alone
  gradient_buckets(stage const& owner, int first_bucket, std::size_t bucket_bytes, bool sharded = false)
      : first_bucket_(first_bucket), sharded_(sharded) {
    for (parameter const& p : owner.parameters()) {
      if (!p.value.requires_grad()) {
        frozen_.push_back(p);
        if (!p.tied_as.empty()) frozen_ties_.push_back(p);
        continue;
      }
      if (parameter* const known = held(p.value)) {
        tie_by_both_names(*known, p);
        continue;
      }
      trained_.push_back(p);
      flat& with = flat_for(p);
      homes_.push_back({static_cast<std::size_t>(&with - flats_.data()), with.elements});
      with.elements += p.value.numel();
    }
    for (flat& f : flats_) {
      f.memory = at::zeros({f.elements}, f.options);
      // Neither Gloo nor NCCL sums complex numbers.
      at::Tensor const numbers = f.memory.is_complex() ? at::view_as_real(f.memory).flatten() : f.memory;
      std::int64_t const most = std::max<std::int64_t>(1, static_cast<std::int64_t>(bucket_bytes) / numbers.element_size());
      for (std::int64_t at = 0; at < numbers.numel(); at += most) {
        std::int64_t const size = std::min(most, numbers.numel() - at);
        buckets_.push_back({numbers.narrow(0, at, size), static_cast<std::size_t>(&f - flats_.data()), at});
      }
    }
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const row = flats_[homes_[i].flat].memory.narrow(0, homes_[i].offset, trained_[i].value.numel());
      // Detached: `zero_grad` of LibTorch calls detach_(), which autograd refuses to views.
      views_.push_back(view_for(trained_[i].value, row).detach());
    }
    zero();
  }
  ~gradient_buckets() {
    for (parameter const& p : trained_) {
      if (hook_of(p.value) != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p.value, nullptr);
    }
  }
  gradient_buckets(gradient_buckets const&) = delete;
  gradient_buckets& operator=(gradient_buckets const&) = delete;

  /// The parameters trained, in the order of registration; a parameter registered twice appears once.
  std::vector<parameter> const& trained() const { return trained_; }
  /// Those that need no gradient.
  std::vector<parameter> const& frozen() const { return frozen_; }
  /// The gradient of each that is trained.
  tensors const& views() const { return views_; }
  /// Parameters that need no gradient and yet are said to be tied.
  std::vector<parameter> const& frozen_ties() const { return frozen_ties_; }

  /// Which parameters are trained is settled when the trainer is made: one frozen since would go on being stepped (momentum,
  /// weight decay), one that needs a gradient only since would not be.
  void check_frozen(int stage_number) const {
    for (auto const* list : {&trained_, &frozen_}) {
      for (parameter const& p : *list) {
        if (p.value.requires_grad() == (list == &trained_)) continue;
        throw usage_error("stage " + std::to_string(stage_number) + "'s " + p.name +
                          (list == &trained_ ? " was frozen" : " needs a gradient") +
                          " since the trainer was made, which settles what is trained. Remedy: a new trainer, from a checkpoint "
                          "if the optimizer is to go on");
      }
    }
  }

  /// Once per step, before the first W or B. Also takes the gradients back if someone gave a parameter another one since.
  void zero() {
    for (flat& f : flats_) f.memory.zero_();
    attach_all();
  }
  /// Gives the parameters these gradients to add to, without changing what is in them.
  void attach_all() {
    for (std::size_t i = 0; i < trained_.size(); ++i) attach(i);
  }

  /// Whether `.grad` of a parameter is no longer where this stage's gradients are added up: emptied or replaced since
  /// `attach_all` (in half precision: given, where it is empty otherwise).
  bool is_detached(std::size_t i) const {
    at::Tensor const& gradient = trained_[i].value.grad();
    return in_float(trained_[i].value) ? gradient.defined() : !gradient.is_same(views_[i]);
  }
  /// Takes over a gradient that a parameter was given between two runs of a step, in place of what was added up; none is zeros.
  /// \throws usage_error for one of another shape or layout
  void take_over(std::size_t i, at::Tensor const& given, int stage_number) {
    at::NoGradGuard const off;
    at::Tensor const& p = trained_[i].value;
    if (!given.defined()) {
      at::Tensor(views_[i]).zero_();
    } else if (given.layout() == at::kStrided && given.sizes() == p.sizes()) {
      at::Tensor(views_[i]).copy_(given);
    } else {
      throw usage_error("stage " + std::to_string(stage_number) + "'s " + trained_[i].name + " was given a gradient of " +
                        (given.layout() == at::kStrided ? "other sizes" : "another layout") +
                        " than its own. Remedy: a dense one of the parameter's sizes, or zero_grad()");
    }
    attach(i);
  }

  /// How often the gradients were changed in place.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    for (flat const& f : flats_) sum += static_cast<std::int64_t>(f.memory._version());
    return sum;
  }

  /// Gives half-precision parameters their gradients, rounded, for the optimizer: until the next `zero`.
  void round() {
    at::NoGradGuard const off;
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const& p = trained_[i].value;
      if (in_float(p)) p.mutable_grad() = views_[i].to(p.scalar_type());
    }
  }

  /// This parameter is the same tensor as another stage's on this rank: then `attach` is called before each B, I and W of this
  /// stage, so that they add into this stage's gradient.
  void shares(std::size_t i) {
    if (std::find(shared_.begin(), shared_.end(), i) == shared_.end()) shared_.push_back(i);
  }
  void attach() {
    for (std::size_t const i : shared_) attach(i);
  }

  /// Another stage's copy of this parameter stands for it in the norm.
  void counts_elsewhere(std::size_t i) { elsewhere_.push_back(i); }
  bool counts_here(std::size_t i) const { return std::find(elsewhere_.begin(), elsewhere_.end(), i) == elsewhere_.end(); }

  /// Of a sharded optimizer the share of this replica alone.
  void scale(double factor) {
    for (flat& f : flats_) own_share_of(f).mul_(factor);
  }

  /// Cuts the parameters of this stage into shares, one for each replica, of nearly equal size; once, before the first sum. A
  /// parameter is cut between two blocks of its norm.
  /// \param whole parameters are not cut: a replica has the whole of each in its share, or nothing
  void cut(int replicas, int replica, bool whole) {
    replica_ = static_cast<std::size_t>(replica);
    for (std::size_t f = 0; f < flats_.size(); ++f) {
      std::vector<std::int64_t> sizes, blocks;
      for (std::size_t i = 0; i < trained_.size(); ++i) {
        if (homes_[i].flat != f) continue;
        std::int64_t const elements = trained_[i].value.numel();
        bool const may_be_cut = !whole && trained_[i].value.is_non_overlapping_and_dense();
        sizes.push_back(elements);
        blocks.push_back(may_be_cut ? norm_block(elements) : std::max<std::int64_t>(elements, 1));
      }
      flats_[f].cut = detail::cut_into_shares(sizes, blocks, replicas);
    }
    for (std::size_t i = 0; i < trained_.size(); ++i)
      cuts_.push_back(detail::part_of_cut(flats_[homes_[i].flat].cut, homes_[i].offset, trained_[i].value.numel()));
  }
  /// A parameter's elements in the order of its memory, by share: replica r's are [cut[r], cut[r + 1]).
  std::vector<std::int64_t> const& cut_of(std::size_t i) const { return cuts_[i]; }
  /// The gradient in the order of its parameter's memory.
  at::Tensor row(std::size_t i) const {
    return flats_[homes_[i].flat].memory.narrow(0, homes_[i].offset, trained_[i].value.numel());
  }

  /// How many numbers a step gathers of a parameter's norm: one, or one for each block where several replicas share it.
  std::size_t norm_numbers(std::size_t i) const {
    std::int64_t const elements = trained_[i].value.numel(), block = norm_block(elements);
    return is_cut(i) ? static_cast<std::size_t>((elements + block - 1) / block) : 1;
  }
  /// Calls `see(counted_gradient)` for all that this rank counts in the norm of a gradient: the whole, or blocks of its share.
  template <class See>
  void each_counted(std::size_t i, See const& see) const {
    if (!counts_here(i)) return;
    if (!sharded_) return see(counted_gradient{views_[i]});
    std::vector<std::int64_t> const& at = cuts_[i];
    if (at[replica_] == at[replica_ + 1]) return;
    if (!is_cut(i)) return see(counted_gradient{views_[i]});
    detail::each_block(row(i), at[replica_], at[replica_ + 1], see);
  }

  /// The largest finite number that the optimizer sees of this gradient.
  double largest(std::size_t i) const {
    auto const dtype = trained_[i].value.scalar_type();
    if (dtype == at::kHalf) return std::numeric_limits<c10::Half>::max();
    if (dtype == at::kBFloat16) return std::numeric_limits<c10::BFloat16>::max();
    return std::numeric_limits<double>::infinity();
  }

  int buckets() const { return static_cast<int>(buckets_.size()); }

  /// Starts to sum this stage's gradients over the replicas: of a sharded optimizer each share for its replica alone. Tied
  /// parameters are summed whole: stages add their gradients up next, and a tie on another stage may be cut elsewhere.
  void start_sums(transport& comm) {
    for (int b = 0; b < buckets(); ++b) {
      bucket const& one = buckets_[static_cast<std::size_t>(b)];
      flat const& of = flats_[one.flat];
      if (!sharded_ || of.tied) {
        comm.start_all_reduce(first_bucket_ + b, one.values);
        continue;
      }
      std::vector<std::int64_t> numbers = of.cut;
      for (std::int64_t& at : numbers) at *= of.memory.is_complex() ? 2 : 1;
      comm.start_reduce_scatter(first_bucket_ + b, one.values, detail::part_of_cut(numbers, one.begin, one.values.numel()));
    }
  }
  void wait_sums(transport& comm) {
    for (int b = 0; b < buckets(); ++b) comm.wait_bucket(first_bucket_ + b);
  }

 private:
  /// Adds a gradient in single precision and lets go of it.
  struct add_in_float final : torch::autograd::PostAccumulateGradHook {
    at::Tensor into;
    void operator()(at::Tensor const& p) override {
      at::NoGradGuard const off;
      into.add_(p.grad());
      p.mutable_grad().reset();
    }
  };

  static bool in_float(at::Tensor const& p) { return p.scalar_type() == at::kHalf || p.scalar_type() == at::kBFloat16; }

  static add_in_float* hook_of(at::Tensor const& p) {
    return dynamic_cast<add_in_float*>(torch::autograd::impl::post_acc_grad_hooks(p).get());
  }

  void attach(std::size_t i) {
    at::Tensor const& p = trained_[i].value;
    if (!in_float(p)) {
      if (!p.grad().is_same(views_[i])) p.mutable_grad() = views_[i];
      return;
    }
    p.mutable_grad().reset();
    if (hook_of(p) == nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<add_in_float>());
    hook_of(p)->into = views_[i];
  }

  struct flat {
    at::TensorOptions options;
    bool tied = false;  // holds tied parameters, of a sharded optimizer
    std::int64_t elements = 0;
    at::Tensor memory;
    std::vector<std::int64_t> cut;  // replicas + 1 offsets; empty unless sharded
  };
  /// A piece of a flat buffer that is summed over the replicas.
  struct bucket {
    at::Tensor values;
    std::size_t flat;
    std::int64_t begin;  // in real numbers
  };
  struct home {
    std::size_t flat;
    std::int64_t offset;
  };

  /// With the parameter's own strides, as autograd has it: kernels choose their ways by them.
  static at::Tensor view_for(at::Tensor const& p, at::Tensor const& row) {
    return p.is_non_overlapping_and_dense() ? row.as_strided(p.sizes(), p.strides()) : row.view(p.sizes());
  }

  parameter* held(at::Tensor const& p) {
    auto const found = std::find_if(trained_.begin(), trained_.end(), [&](parameter const& t) { return t.value.is_same(p); });
    return found == trained_.end() ? nullptr : &*found;
  }

  /// What is said of one name of a parameter registered twice holds for the parameter.
  static void tie_by_both_names(parameter& known, parameter const& again) {
    if (again.tied_as.empty()) return;
    if (!known.tied_as.empty() && known.tied_as != again.tied_as) {
      throw usage_error(known.name + " and " + again.name + " are one parameter, but tied as `" + known.tied_as + "` and as `" +
                        again.tied_as + "`: use one group");
    }
    known.tied_as = again.tied_as;
  }

  /// A tied parameter of a sharded optimizer has a buffer of its own.
  flat& flat_for(parameter const& of) {
    at::Tensor const& p = of.value;
    bool const tied = sharded_ && !of.tied_as.empty();
    auto const options = at::TensorOptions().dtype(in_float(p) ? at::kFloat : p.scalar_type()).device(p.device());
    for (flat& f : flats_) {
      if (!tied && !f.tied && f.options.dtype() == options.dtype() && f.options.device() == options.device()) return f;
    }
    flats_.push_back({.options = options, .tied = tied, .memory = {}, .cut = {}});
    return flats_.back();
  }

  bool is_cut(std::size_t i) const {
    if (!sharded_) return false;
    std::vector<std::int64_t> const& at = cuts_[i];
    return std::any_of(at.begin(), at.end(), [&](std::int64_t where) { return where > 0 && where < at.back(); });
  }
  at::Tensor own_share_of(flat const& f) const {
    return sharded_ ? f.memory.narrow(0, f.cut[replica_], f.cut[replica_ + 1] - f.cut[replica_]) : f.memory;
  }

  int first_bucket_;
  std::vector<parameter> trained_;
  std::vector<parameter> frozen_, frozen_ties_;
  std::vector<flat> flats_;
  std::vector<home> homes_;
  std::vector<std::vector<std::int64_t>> cuts_;  // by parameter; empty unless sharded
  tensors views_;
  std::vector<bucket> buckets_;
  bool sharded_;
  std::size_t replica_ = 0;
  std::vector<std::size_t> shared_;     // see shares(i)
  std::vector<std::size_t> elsewhere_;  // see counts_elsewhere()
};

}  // namespace chevron
