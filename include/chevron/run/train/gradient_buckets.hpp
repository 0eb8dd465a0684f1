#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/flat_gradients.hpp>
#include <chevron/run/train/gradient_norm.hpp>
#include <chevron/run/train/gradient_place.hpp>

/// \file
/// The memory of a stage's gradients, and their sum over the replicas.

namespace chevron::detail {

/// The gradients of one stage's trained parameters, as views into a flat buffer per dtype and device (a sharded optimizer and
/// experts need further buffers, see `flat_for`), so that zeroing, scaling and sums over replicas handle few large pieces.
/// Gradients of half-precision parameters are accumulated, and summed over replicas, in single precision.
///
/// The constructor allocates the buffers. W and B add to them through the parameters' `.grad` (in half precision: a hook adds
/// each gradient as soon as autograd has computed the gradient, and empties `.grad`). After the stage's last W or B,
/// `start_sums` passes the buffers to the transport in buckets; no code writes to a buffer until `wait_sums` has returned.
///
/// With `sharding::gradients` a buffer, except for tied parameters, is allocated again before the stage's first B, I or W of a
/// step (`make`), and `wait_sums` frees all of it but this replica's share. `.grad` is empty while the buffer is freed.
class gradient_buckets {
 public:
  /// \param collectives from which the sums of buckets claim their numbers
  /// \param bucket_bytes largest size of a bucket; a bucket contains several parameters, or a part of a parameter
  /// \param over_replicas other than `nothing`: each replica steps its share of the parameters (see `cut`), and receives only
  /// the sums of this share
  /// \param experts_apart true: gradients of experts are summed over `rank_group::expert_copies`, not over all replicas
  gradient_buckets(stage const& owner, collective_numbers& collectives, std::size_t bucket_bytes,
                   sharding over_replicas = sharding::nothing, bool experts_apart = false)
      : over_replicas_(over_replicas), experts_apart_(experts_apart) {
    for (parameter const& p : owner.parameters()) {
      if (!p.value.requires_grad()) {
        frozen_.push_back(p);
        continue;
      }
      if (parameter* const known = held(p.value)) {
        detail::tie_by_both_names(*known, p);
        continue;
      }
      trained_.push_back(p);
      made_as_.push_back(form_of(p.value));
      flat_gradients& with = flat_for(p);
      homes_.push_back({static_cast<std::size_t>(&with - flats_.data()), with.add(p.value.numel())});
    }
    for (flat_gradients& f : flats_) f.number(collectives, bucket_bytes);
    views_.resize(trained_.size());
    zero();
  }
  /// Removes the hooks of half-precision parameters.
  ~gradient_buckets() {
    for (parameter const& p : trained_) detail::add_gradients_to_grad(p.value);
  }
  gradient_buckets(gradient_buckets const&) = delete;
  gradient_buckets& operator=(gradient_buckets const&) = delete;

  /// The trained parameters, in the order of registration; a parameter registered twice appears once.
  std::vector<parameter> const& trained() const { return trained_; }
  std::vector<parameter> const& frozen() const { return frozen_; }  ///< the parameters that need no gradient
  /// The gradients of `trained()`, in its order; undefined while their buffer does not exist.
  tensors const& views() const { return views_; }

  /// Refuses a `requires_grad` that changed since construction: a parameter frozen later would still be stepped (momentum,
  /// weight decay), and a parameter unfrozen later would not be stepped. \param stage_number for the error
  /// \throws usage_error naming the parameter
  void check_frozen(int stage_number) const {
    for (auto const* list : {&trained_, &frozen_}) {
      for (parameter const& p : *list) {
        if (p.value.requires_grad() == (list == &trained_)) continue;
        throw usage_error("stage " + std::to_string(stage_number) + "'s " + p.name +
                          (list == &trained_ ? " was frozen" : " needs a gradient") +
                          " after the trainer was made, whose trained parameters are fixed. Remedy: a new trainer, from a "
                          "checkpoint if the optimizer's state is to be kept");
      }
    }
  }
  /// Refuses a trained parameter with another dtype, shape or device than at construction (`module->to(at::kDouble)`), since its
  /// gradients and the optimizer's state keep the former ones. \param stage_number for the error
  /// \throws usage_error naming the parameter
  void check_forms(int stage_number) const {
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const& now = trained_[i].value;
      form const& then = made_as_[i];
      if (now.scalar_type() == then.dtype && now.device() == then.device && now.sizes() == at::IntArrayRef(then.sizes)) continue;
      throw usage_error("stage " + std::to_string(stage_number) + "'s " + trained_[i].name + " is " + words_of(form_of(now)) +
                        ", and was " + words_of(then) +
                        " when the trainer was made: gradients and the optimizer's state keep that form. Remedy: convert "
                        "modules before the trainer is made");
    }
  }

  /// Sets the gradients to zero, and each `.grad` to its view of a buffer. Called once per step, before the first W or B.
  void zero() {
    for (flat_gradients& f : flats_) f.zero();
    emptied_.clear();
    make_views();
    attach_all();
  }
  /// Whether all buffers exist.
  bool is_there() const {
    return std::all_of(flats_.begin(), flats_.end(), [](flat_gradients const& f) { return f.is_there(); });
  }
  /// Allocates the buffers that do not exist, filled with zeros.
  void make() {
    for (flat_gradients& f : flats_) f.make();
    make_views();
    attach_all();
  }
  /// Sets each parameter's `.grad` to its view of a buffer, whose values are unchanged.
  void attach_all() {
    for (std::size_t i = 0; i < trained_.size(); ++i) attach(i);
  }

  /// Whether the `.grad` of trained parameter `i` was emptied or replaced since `attach_all`, so that a backward would not add
  /// to this gradient. (In half precision, or without a buffer: whether `.grad` is defined, or was emptied before the buffer
  /// was freed.)
  bool is_detached(std::size_t i) const {
    at::Tensor const& gradient = trained_[i].value.grad();
    if (detail::in_float(trained_[i].value) || !views_[i].defined()) return gradient.defined() || emptied_.contains(i);
    return !gradient.is_same(views_[i]);
  }
  /// Overwrites gradient `i`, between two runs of a step, with the values of a tensor that the caller set as `.grad`.
  /// \param given the caller's tensor; undefined: zeros \param stage_number for the error
  /// \throws usage_error for a tensor of another shape or layout
  void take_over(std::size_t i, at::Tensor const& given, int stage_number) {
    at::NoGradGuard const off;
    at::Tensor const& p = trained_[i].value;
    if (!is_there()) make();
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

  /// The number of in-place operations on the gradients.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    for (flat_gradients const& f : flats_) sum += f.changes();
    return sum;
  }

  /// Calls `see(parameter, gradient)` for each half-precision parameter, whose gradient is in single precision.
  template <class See>
  void each_in_float(See const& see) const {
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      if (detail::in_float(trained_[i].value)) see(trained_[i].value, views_[i]);
    }
  }

  /// Marks parameter `i`, a tensor that another stage of this rank has, too, so that `attach` sets its `.grad` for this stage.
  void shares(std::size_t i) { shared_.insert(i); }
  /// Sets the `.grad` of shared parameters to this stage's gradients. Called before each B, I and W of this stage.
  void attach() {
    for (std::size_t const i : shared_) attach(i);
  }

  /// Excludes gradient `i` from the norm, which counts another stage's copy of the tied parameter.
  void counts_elsewhere(std::size_t i) { elsewhere_.insert(i); }
  /// Whether gradient `i` is in the norm.
  bool counts_here(std::size_t i) const { return !elsewhere_.contains(i); }

  /// Multiplies the gradients by a factor; with a sharded optimizer, only this replica's share.
  void scale(double factor) {
    for (flat_gradients& f : flats_) f.own().mul_(factor);
  }

  /// Divides this stage's parameters into one share per replica, of nearly equal sizes. Called once, before the first sum. Cuts
  /// fall between blocks of a parameter's norm (`norm_block`). \param whole true: each parameter is whole in one share
  void cut(int replicas, int replica, bool whole) {
    replica_ = static_cast<std::size_t>(replica);
    is_cut_ = true;
    for (std::size_t f = 0; f < flats_.size(); ++f) {
      std::vector<std::int64_t> sizes, blocks;
      for (std::size_t i = 0; i < trained_.size(); ++i) {
        if (homes_[i].flat != f) continue;
        std::int64_t const elements = trained_[i].value.numel();
        bool const may_be_cut = !whole && trained_[i].value.is_non_overlapping_and_dense();
        sizes.push_back(elements);
        blocks.push_back(may_be_cut ? norm_block(elements) : std::max<std::int64_t>(elements, 1));
      }
      flats_[f].cut(detail::cut_into_shares(sizes, blocks, replicas), replica_);
    }
    for (std::size_t i = 0; i < trained_.size(); ++i)
      cuts_.push_back(detail::part_of_cut(flats_[homes_[i].flat].cut(), homes_[i].offset, trained_[i].value.numel()));
  }
  /// The cut of trained parameter `i`, as offsets of elements in the order of its memory: replica r steps [cut[r], cut[r + 1]).
  std::vector<std::int64_t> const& cut_of(std::size_t i) const { return cuts_[i]; }
  /// The part of gradient `i` in this replica's share, in the order of its parameter's memory.
  at::Tensor share_of(std::size_t i) const {
    std::int64_t const begin = cuts_[i][replica_];
    return flat_of(i).row(homes_[i].offset + begin, cuts_[i][replica_ + 1] - begin);
  }
  /// The part of gradient `i` that exists now: the whole, or this replica's share; undefined if the share has no element of it.
  at::Tensor here(std::size_t i) const {
    if (views_[i].defined()) return views_[i];
    return cuts_[i][replica_] < cuts_[i][replica_ + 1] ? share_of(i) : at::Tensor();
  }
  /// The whole gradient `i`. If its buffer is freed, the gradient must lie in this replica's share.
  at::Tensor whole(std::size_t i) const {
    at::Tensor const& p = trained_[i].value;
    return views_[i].defined() ? views_[i] : detail::gradient_view(p, flat_of(i).row(homes_[i].offset, p.numel()));
  }
  /// Whether the buffer of gradient `i` is freed between two steps' backwards.
  bool is_freed(std::size_t i) const { return flat_of(i).is_freed(); }
  /// Calls `see(tensor)` for each buffer of gradients, or share of a freed buffer, that exists now.
  template <class See>
  void each_tensor(See const& see) const {
    for (flat_gradients const& f : flats_) f.each_tensor(see);
  }
  /// The bytes by which all buffers together exceed the memory of gradients that exists now.
  std::int64_t bytes_freed() const {
    std::int64_t sum = 0;
    for (flat_gradients const& f : flats_) sum += f.bytes_freed();
    return sum;
  }

  /// The count of numbers that a step gathers for the norm of gradient `i`: 1, or the number of blocks if the parameter is cut.
  std::size_t norm_numbers(std::size_t i) const {
    std::int64_t const elements = trained_[i].value.numel(), block = norm_block(elements);
    return is_cut(i) ? static_cast<std::size_t>((elements + block - 1) / block) : 1;
  }
  /// Calls `see(counted_gradient)` for the parts of gradient `i` that this rank contributes to the norm: the whole, or blocks.
  template <class See>
  void each_counted(std::size_t i, See const& see) const {
    if (!counts_here(i)) return;
    if (!is_cut_) return see(counted_gradient{views_[i]});
    std::vector<std::int64_t> const& at = cuts_[i];
    if (at[replica_] == at[replica_ + 1]) return;
    if (!is_cut(i)) return see(counted_gradient{whole(i)});
    at::Tensor const share = share_of(i);
    std::int64_t const block = norm_block(trained_[i].value.numel());
    for (std::int64_t from = 0; from < share.numel(); from += block) {
      at::Tensor const one = share.narrow(0, from, std::min(block, share.numel() - from));
      see(counted_gradient{one, static_cast<std::size_t>((at[replica_] + from) / block), true});
    }
  }

  /// Sums partial gradients over the shards, and starts the sums over the replicas; with a sharded optimizer each replica gets
  /// only its share's. Tied parameters are summed whole: stages add them up next, and shares may cut copies differently.
  void start_sums(transport& comm) {
    if (!is_there()) make();  // no backward of this step has reached the stage
    if (comm.topology().shards > 1) {
      for (flat_gradients& f : flats_) detail::add_parts(parts_in(f), comm);
    }
    for (flat_gradients& f : flats_) f.start_sums(comm);
    summing_ = true;
  }
  /// Waits for the transport's sums; with `sharding::gradients`, then frees the buffers except for this replica's share.
  void wait_sums(transport& comm) {
    if (!std::exchange(summing_, false)) return;
    for (flat_gradients& f : flats_) f.wait_sums(comm);
    free();
  }

 private:
  /// Dtype, device and shape of a parameter.
  struct form {
    at::ScalarType dtype;
    at::Device device;
    std::vector<std::int64_t> sizes;
  };
  static form form_of(at::Tensor const& p) { return {p.scalar_type(), p.device(), p.sizes().vec()}; }
  static std::string words_of(form const& f) {
    return c10::str(f.dtype, " of shape ", at::IntArrayRef(f.sizes), " on ", f.device);
  }

  void attach(std::size_t i) { detail::add_gradients_into(trained_[i].value, views_[i]); }

  void free() {
    if (over_replicas_ != sharding::gradients) return;
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const& p = trained_[i].value;
      if (!is_freed(i)) continue;
      // `check_attached` reports these gradients at the end of the step.
      if (!p.grad().defined() && !detail::in_float(p)) emptied_.insert(i);
      if (!is_detached(i)) p.mutable_grad().reset();
      if (detail::hook_of(p) != nullptr) detail::hook_of(p)->into.reset();
    }
    for (flat_gradients& f : flats_) f.keep_share();
    make_views();
  }
  /// Creates the views of buffers that exist, and drops the views of freed buffers.
  void make_views() {
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      if (!flat_of(i).is_there()) {
        views_[i].reset();
      } else if (!views_[i].defined()) {
        at::Tensor const row = flat_of(i).row(homes_[i].offset, trained_[i].value.numel());
        // Detached, since LibTorch's `zero_grad` calls detach_(), which autograd refuses for views.
        views_[i] = detail::gradient_view(trained_[i].value, row).detach();
      }
    }
  }
  flat_gradients const& flat_of(std::size_t i) const { return flats_[homes_[i].flat]; }
  /// The gradients of a buffer of which each shard has computed a part.
  tensors parts_in(flat_gradients const& f) const {
    tensors out;
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      if (trained_[i].held == over_shards::partial && &flat_of(i) == &f)
        out.push_back(f.row(homes_[i].offset, trained_[i].value.numel()));
    }
    return out;
  }

  struct home {
    std::size_t flat;
    std::int64_t offset;
  };

  parameter* held(at::Tensor const& p) {
    auto const found = std::find_if(trained_.begin(), trained_.end(), [&](parameter const& t) { return t.value.is_same(p); });
    return found == trained_.end() ? nullptr : &*found;
  }

  /// Returns the buffer for a parameter, and creates the buffer if it is missing. With a sharded optimizer, each tied parameter
  /// has a buffer of its own, whose whole sum every replica receives.
  flat_gradients& flat_for(parameter const& of) {
    at::Tensor const& p = of.value;
    bool const sharded = over_replicas_ != sharding::nothing, shared = sharded && of.tied_as.empty();
    auto const options = at::TensorOptions().dtype(detail::in_float(p) ? at::kFloat : p.scalar_type()).device(p.device());
    auto const among = experts_apart_ && of.cut_over == rank_group::experts ? rank_group::expert_copies : rank_group::replicas;
    for (flat_gradients& f : flats_) {
      bool const alike = f.options().dtype() == options.dtype() && f.options().device() == options.device() && f.among() == among;
      if (alike && shared == f.is_shared() && (shared || !sharded)) return f;
    }
    flats_.emplace_back(options, shared, shared && over_replicas_ == sharding::gradients, among);
    return flats_.back();
  }

  bool is_cut(std::size_t i) const {
    if (!is_cut_) return false;
    std::vector<std::int64_t> const& at = cuts_[i];
    return std::any_of(at.begin(), at.end(), [&](std::int64_t where) { return where > 0 && where < at.back(); });
  }

  sharding over_replicas_;
  bool experts_apart_;
  std::vector<parameter> trained_, frozen_;
  std::vector<form> made_as_;  // by parameter
  std::vector<flat_gradients> flats_;
  std::vector<home> homes_;
  std::vector<std::vector<std::int64_t>> cuts_;  // by parameter; empty unless cut
  tensors views_;
  bool is_cut_ = false, summing_ = false;
  std::size_t replica_ = 0;
  std::set<std::size_t> shared_, elsewhere_;  // see shares(i), counts_elsewhere(i)
  std::set<std::size_t> emptied_;             // gradients whose `.grad` was empty when their buffer was freed
};

}  // namespace chevron::detail
