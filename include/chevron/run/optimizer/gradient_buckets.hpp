#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
/// Where a stage's gradients live, and their sum over the replicas.

namespace chevron {

/// The gradients of one stage's parameters, as views into one flat buffer per dtype and device, so that zeroing, scaling and
/// summing over replicas handle few large pieces. Parameters that need no gradient have none here. Gradients of half-precision
/// parameters are added up, and summed over replicas, in single precision.
///
/// The buffers are made once. W and B add into them through the parameters' `.grad` (in half precision: each gradient is added as
/// soon as it is there, and `.grad` is left empty); `start_sums` hands them to the transport in buckets, once the stage's
/// last W or B is done, and nobody writes to them until `wait_sums` returned.
///
/// With `sharding::gradients` a buffer, but of tied parameters, is made anew before the stage's first B, I or W of a step
/// (`make`), and `wait_sums` frees all but this replica's share. While no buffer exists, `.grad` is empty.
class gradient_buckets {
 public:
  /// \param first_bucket buckets are numbered over the whole rank; this stage's begin here
  /// \param bucket_bytes largest size of a bucket; a bucket may hold several parameters, or a part of one
  /// \param over_replicas other than `nothing`: each replica steps its share of the parameters (`cut` says which), and gets the
  /// sums of that share alone
  /// \param experts_apart gradients of experts are summed over the copies of their expert group, not over all replicas
  gradient_buckets(stage const& owner, int first_bucket, std::size_t bucket_bytes, sharding over_replicas = sharding::nothing,
                   bool experts_apart = false)
      : over_replicas_(over_replicas), experts_apart_(experts_apart) {
    for (parameter const& p : owner.parameters()) {
      if (!p.value.requires_grad()) {
        frozen_.push_back(p);
        if (!p.tied_as.empty()) frozen_ties_.push_back(p);
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
  ~gradient_buckets() {
    for (parameter const& p : trained_) {
      if (detail::hook_of(p.value) != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p.value, nullptr);
    }
  }
  gradient_buckets(gradient_buckets const&) = delete;
  gradient_buckets& operator=(gradient_buckets const&) = delete;

  /// The parameters trained, in the order of registration; a parameter registered twice appears once.
  std::vector<parameter> const& trained() const { return trained_; }
  /// Those that need no gradient.
  std::vector<parameter> const& frozen() const { return frozen_; }
  /// The gradient of each that is trained; undefined while its buffer does not exist.
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
  /// Gives the parameters these gradients to add to, without changing what is in them.
  void attach_all() {
    for (std::size_t i = 0; i < trained_.size(); ++i) attach(i);
  }

  /// Whether `.grad` of a parameter is no longer where this stage's gradients are added up: emptied or replaced since
  /// `attach_all` (in half precision: given, where it is empty otherwise).
  bool is_detached(std::size_t i) const {
    at::Tensor const& gradient = trained_[i].value.grad();
    if (detail::in_float(trained_[i].value) || !views_[i].defined()) return gradient.defined() || was_emptied(i);
    return !gradient.is_same(views_[i]);
  }
  /// Takes over a gradient that a parameter was given between two runs of a step, in place of what was added up; none is zeros.
  /// \throws usage_error for one of another shape or layout
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

  /// How often the gradients were changed in place.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    for (flat_gradients const& f : flats_) sum += f.changes();
    return sum;
  }

  /// Gives half-precision parameters their rounded gradients, for the optimizer: until the next `zero`.
  void round() {
    at::NoGradGuard const off;
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      at::Tensor const& p = trained_[i].value;
      if (detail::in_float(p)) p.mutable_grad() = views_[i].to(p.scalar_type());
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
    for (flat_gradients& f : flats_) f.own().mul_(factor);
  }

  /// Cuts the parameters of this stage into shares, one for each replica, of nearly equal size; once, before the first sum. A
  /// parameter is cut between two blocks of its norm.
  /// \param whole parameters are not cut: a replica has the whole of each in its share, or nothing
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
  /// A parameter's elements in the order of its memory, by share: replica r's are [cut[r], cut[r + 1]).
  std::vector<std::int64_t> const& cut_of(std::size_t i) const { return cuts_[i]; }
  /// The part of a gradient in this replica's share, in the order of its parameter's memory.
  at::Tensor share_of(std::size_t i) const {
    std::int64_t const begin = cuts_[i][replica_];
    return flat_of(i).row(homes_[i].offset + begin, cuts_[i][replica_ + 1] - begin);
  }
  /// All of a gradient that exists: the whole, or this replica's share of it; undefined where the share has none of it.
  at::Tensor here(std::size_t i) const {
    if (views_[i].defined()) return views_[i];
    return cuts_[i][replica_] < cuts_[i][replica_ + 1] ? share_of(i) : at::Tensor();
  }
  /// A whole gradient, which is in this replica's share where its buffer does not exist.
  at::Tensor whole(std::size_t i) const {
    at::Tensor const& p = trained_[i].value;
    return views_[i].defined() ? views_[i] : detail::gradient_view(p, flat_of(i).row(homes_[i].offset, p.numel()));
  }
  /// Whether a gradient's buffer is freed between two steps' backwards.
  bool is_freed(std::size_t i) const { return flat_of(i).is_freed(); }
  /// Calls `see(tensor)` for the gradients' memory that exists now.
  template <class See>
  void each_tensor(See const& see) const {
    for (flat_gradients const& f : flats_) f.each_tensor(see);
  }
  /// Bytes by which the buffers are larger when all of them exist.
  std::int64_t bytes_freed() const {
    std::int64_t sum = 0;
    for (flat_gradients const& f : flats_) sum += f.bytes_freed();
    return sum;
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
    if (!is_cut_) return see(counted_gradient{views_[i]});
    std::vector<std::int64_t> const& at = cuts_[i];
    if (at[replica_] == at[replica_ + 1]) return;
    if (!is_cut(i)) return see(counted_gradient{whole(i)});
    detail::each_block(share_of(i), at[replica_], trained_[i].value.numel(), see);
  }

  int buckets() const { return buckets_; }

  /// Starts to sum this stage's gradients over the replicas: of a sharded optimizer each share for its replica alone. Tied
  /// parameters are summed whole: stages add their gradients up next, and a tie on another stage may be cut elsewhere.
  void start_sums(transport& comm) {
    if (!is_there()) make();  // no backward of this step has reached the stage
    if (comm.topology().shards > 1) {
      for (flat_gradients& f : flats_) detail::add_parts(parts_in(f), comm);
    }
    for (flat_gradients& f : flats_) f.start_sums(comm);
    summing_ = true;
  }
  /// Waits for the sums that were started, and frees buffers that are freed then.
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
      // `check_attached` looks when the step ends.
      if (!p.grad().defined() && !detail::in_float(p)) emptied_.push_back(i);
      if (!is_detached(i)) p.mutable_grad().reset();
      if (detail::hook_of(p) != nullptr) detail::hook_of(p)->into.reset();
    }
    for (flat_gradients& f : flats_) f.keep_share();
    make_views();
  }
  /// Of buffers that exist.
  void make_views() {
    for (std::size_t i = 0; i < trained_.size(); ++i) {
      if (!flat_of(i).is_there()) {
        views_[i].reset();
      } else if (!views_[i].defined()) {
        at::Tensor const row = flat_of(i).row(homes_[i].offset, trained_[i].value.numel());
        // Detached: `zero_grad` of LibTorch calls detach_(), which autograd refuses to views.
        views_[i] = detail::gradient_view(trained_[i].value, row).detach();
      }
    }
  }
  bool was_emptied(std::size_t i) const { return std::find(emptied_.begin(), emptied_.end(), i) != emptied_.end(); }
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

  /// A tied parameter of a sharded optimizer has a buffer of its own, whose sum each replica gets whole.
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
  std::vector<parameter> trained_;
  std::vector<parameter> frozen_, frozen_ties_;
  std::vector<flat_gradients> flats_;
  std::vector<home> homes_;
  std::vector<std::vector<std::int64_t>> cuts_;  // by parameter; empty unless cut
  tensors views_;
  int buckets_ = 0;
  bool is_cut_ = false, summing_ = false;
  std::size_t replica_ = 0;
  std::vector<std::size_t> shared_;     // see shares(i)
  std::vector<std::size_t> elsewhere_;  // see counts_elsewhere()
  std::vector<std::size_t> emptied_;    // gradients without a `.grad` when their buffer was freed
};

}  // namespace chevron
