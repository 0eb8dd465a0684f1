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
#include <torch/csrc/autograd/variable.h>

#include <chevron/run/comm/flat_gradients.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/execution/gradient_place.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/gradient_norm.hpp>

/// \file
/// The memory of a stage's gradients, and their sum over the replicas.

namespace chevron::detail {

/// The gradients of one stage's trained parameters, as views into one flat buffer per dtype and device, so that zeroing, scaling
/// and summing over replicas handle few large pieces. Gradients of half-precision parameters are added up, and summed over
/// replicas, in single precision.
///
/// The buffers are made once. W and B add into them through the parameters' `.grad` (in half precision: a hook adds each gradient
/// as soon as autograd has computed the gradient, and leaves `.grad` empty); `start_sums` hands the buffers to the transport in
/// buckets, after the stage's last W or B, and no code writes to a buffer until `wait_sums` returned.
///
/// With `sharding::gradients` a buffer, but of tied parameters, is made anew before the stage's first B, I or W of a step
/// (`make`), and `wait_sums` frees all but this replica's share. While no buffer exists, `.grad` is empty.
class gradient_buckets {
 public:
  /// \param first_bucket number of this stage's first bucket; buckets are numbered over the whole rank
  /// \param bucket_bytes largest size of a bucket; a bucket may hold several parameters, or a part of one
  /// \param over_replicas other than `nothing`: each replica steps its share of the parameters (see `cut`), and gets the sums of
  /// that share alone
  /// \param experts_apart gradients of experts are summed over the copies of their expert group, not over all replicas
  gradient_buckets(stage const& owner, int first_bucket, std::size_t bucket_bytes, sharding over_replicas = sharding::nothing,
                   bool experts_apart = false)
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
      flat_gradients& with = flat_for(p);
      homes_.push_back({static_cast<std::size_t>(&with - flats_.data()), with.add(p.value.numel())});
    }
    for (flat_gradients& f : flats_) buckets_ += f.number(first_bucket + buckets_, bucket_bytes);
    views_.resize(trained_.size());
    zero();
  }
  /// Removes the hooks of half-precision parameters.
  ~gradient_buckets() {
    for (parameter const& p : trained_) {
      if (detail::hook_of(p.value) != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p.value, nullptr);
    }
  }
  gradient_buckets(gradient_buckets const&) = delete;
  gradient_buckets& operator=(gradient_buckets const&) = delete;

  /// The parameters trained, in the order of registration; a parameter registered twice appears once.
  std::vector<parameter> const& trained() const { return trained_; }
  std::vector<parameter> const& frozen() const { return frozen_; }  ///< the parameters that need no gradient
  /// The gradients of `trained()`, in its order; undefined while their buffer does not exist.
  tensors const& views() const { return views_; }

  /// Refuses a `requires_grad` that changed since construction: a parameter frozen since would still be stepped (momentum, weight
  /// decay), a parameter that needs a gradient only since would not be. \param stage_number for the error
  /// \throws usage_error naming the parameter
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

  /// Sets the gradients to zero, and each `.grad` to its gradient again: once per step, before the first W or B.
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
  /// Makes the buffers that do not exist, of zeros.
  void make() {
    for (flat_gradients& f : flats_) f.make();
    make_views();
    attach_all();
  }
  /// Sets each parameter's `.grad` to its gradient here, whose values stay.
  void attach_all() {
    for (std::size_t i = 0; i < trained_.size(); ++i) attach(i);
  }

  /// Whether the `.grad` of trained parameter `i` was emptied or replaced since `attach_all`: a backward would not add to this
  /// stage's gradient. (In half precision, and without a buffer: whether `.grad` is defined, or was emptied before the free.)
  bool is_detached(std::size_t i) const {
    at::Tensor const& gradient = trained_[i].value.grad();
    if (detail::in_float(trained_[i].value) || !views_[i].defined()) return gradient.defined() || emptied_.contains(i);
    return !gradient.is_same(views_[i]);
  }
  /// Overwrites gradient `i`, between two runs of a step, with the values of a tensor that the caller set as `.grad`.
  /// \param given undefined: zeros \param stage_number for the error
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

  /// The number of changes in place to the gradients.
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

  /// Says that parameter `i` is the same tensor as another stage's on this rank, so that its `.grad` changes with the stage.
  void shares(std::size_t i) { shared_.insert(i); }
  /// Sets the `.grad` of shared parameters to this stage's gradients: before each B, I and W of this stage.
  void attach() {
    for (std::size_t const i : shared_) attach(i);
  }

  /// Leaves gradient `i` out of the norm, in which another stage's copy of the tied parameter counts.
  void counts_elsewhere(std::size_t i) { elsewhere_.insert(i); }
  /// Whether gradient `i` is in the norm.
  bool counts_here(std::size_t i) const { return !elsewhere_.contains(i); }

  /// Multiplies the gradients by a factor; of a sharded optimizer, this replica's share alone.
  void scale(double factor) {
    for (flat_gradients& f : flats_) f.own().mul_(factor);
  }

  /// Cuts the parameters of this stage into shares, one for each replica, of nearly equal size; once, before the first sum. A
  /// parameter is cut between two blocks of its norm. \param whole no parameter is cut: each is in one replica's share
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
  /// The shares of trained parameter `i`, offsets in elements in the order of its memory: of replica r [cut[r], cut[r + 1]).
  std::vector<std::int64_t> const& cut_of(std::size_t i) const { return cuts_[i]; }
  /// The part of gradient `i` in this replica's share, in the order of its parameter's memory.
  at::Tensor share_of(std::size_t i) const {
    std::int64_t const begin = cuts_[i][replica_];
    return flat_of(i).row(homes_[i].offset + begin, cuts_[i][replica_ + 1] - begin);
  }
  /// The existing part of gradient `i`: the whole, or this replica's share; undefined where the share is empty.
  at::Tensor here(std::size_t i) const {
    if (views_[i].defined()) return views_[i];
    return cuts_[i][replica_] < cuts_[i][replica_ + 1] ? share_of(i) : at::Tensor();
  }
  /// The whole of gradient `i`, which must lie in this replica's share where its buffer does not exist.
  at::Tensor whole(std::size_t i) const {
    at::Tensor const& p = trained_[i].value;
    return views_[i].defined() ? views_[i] : detail::gradient_view(p, flat_of(i).row(homes_[i].offset, p.numel()));
  }
  /// Whether the buffer of gradient `i` is freed between two steps' backwards.
  bool is_freed(std::size_t i) const { return flat_of(i).is_freed(); }
  /// Calls `see(tensor)` for the gradients' memory that exists now.
  template <class See>
  void each_tensor(See const& see) const {
    for (flat_gradients const& f : flats_) f.each_tensor(see);
  }
  /// The bytes that all buffers together take beyond the memory that exists now.
  std::int64_t bytes_freed() const {
    std::int64_t sum = 0;
    for (flat_gradients const& f : flats_) sum += f.bytes_freed();
    return sum;
  }

  /// The count of numbers that a step gathers of the norm of gradient `i`: 1, or its blocks where replicas share the parameter.
  std::size_t norm_numbers(std::size_t i) const {
    std::int64_t const elements = trained_[i].value.numel(), block = norm_block(elements);
    return is_cut(i) ? static_cast<std::size_t>((elements + block - 1) / block) : 1;
  }
  /// Calls `see(counted_gradient)` for the parts of gradient `i` that this rank counts in the norm: the whole, or blocks.
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

  int buckets() const { return buckets_; }  ///< the number of this stage's buckets

  /// Starts the transport's sums of this stage's gradients over the replicas: of a sharded optimizer each share for its replica
  /// alone. Tied parameters are summed whole, as stages add their gradients up next, and shares may cut two copies differently.
  void start_sums(transport& comm) {
    if (!is_there()) make();  // no backward of this step has reached the stage
    if (comm.topology().shards > 1) {
      for (flat_gradients& f : flats_) detail::add_parts(parts_in(f), comm);
    }
    for (flat_gradients& f : flats_) f.start_sums(comm);
    summing_ = true;
  }
  /// Waits for the transport's sums, and with `sharding::gradients` frees the buffers, but this replica's share.
  void wait_sums(transport& comm) {
    if (!std::exchange(summing_, false)) return;
    for (flat_gradients& f : flats_) f.wait_sums(comm);
    free();
  }

 private:
  void attach(std::size_t i) { detail::add_gradients_into(trained_[i].value, views_[i]); }

  void free() {
    if (over_replicas_ != sharding::gradients) return;
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const& p = trained_[i].value;
      if (!is_freed(i)) continue;
      // For `check_attached`, at the end of the step.
      if (!p.grad().defined() && !detail::in_float(p)) emptied_.insert(i);
      if (!is_detached(i)) p.mutable_grad().reset();
      if (detail::hook_of(p) != nullptr) detail::hook_of(p)->into.reset();
    }
    for (flat_gradients& f : flats_) f.keep_share();
    make_views();
  }
  /// Makes the views of buffers that exist.
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
  /// The partial gradients of a buffer.
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

  /// The buffer for a parameter. Tied parameters of a sharded optimizer have a buffer apart, whose sum each replica gets whole.
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
  std::vector<flat_gradients> flats_;
  std::vector<home> homes_;
  std::vector<std::vector<std::int64_t>> cuts_;  // by parameter; empty unless cut
  tensors views_;
  int buckets_ = 0;
  bool is_cut_ = false, summing_ = false;
  std::size_t replica_ = 0;
  std::set<std::size_t> shared_, elsewhere_;  // see shares(i), counts_elsewhere(i)
  std::set<std::size_t> emptied_;             // gradients without a `.grad` when their buffer was freed
};

}  // namespace chevron::detail
