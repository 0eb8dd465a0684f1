#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/train/collective_numbers.hpp>

/// \file
/// A flat buffer of gradients, and its sum over the replicas.

namespace chevron::detail {

/// Stores gradients of one dtype and device side by side in one flat buffer, and sums the buffer over the replicas in buckets.
/// A buffer with `is_freed` is allocated from `make` until its sums have arrived; after that, until the next `zero`, only this
/// replica's share is allocated.
class flat_gradients {
 public:
  /// \param is_shared each replica receives the sums of its own share only; `cut` sets the shares
  /// \param is_freed the buffer is freed between sums and the next `make`; only with `is_shared`
  /// \param among the ranks over which gradients are summed: replicas, or copies of experts
  flat_gradients(at::TensorOptions const& options, bool is_shared, bool is_freed, rank_group among)
      : options_(options), shared_(is_shared), freed_(is_freed), among_(among) {}

  at::TensorOptions const& options() const { return options_; }
  /// Whether each replica receives the sums of its own share only.
  bool is_shared() const { return shared_; }
  /// Whether the buffer is freed between sums and the next `make`.
  bool is_freed() const { return freed_; }
  rank_group among() const { return among_; }

  /// Appends a gradient to the buffer. Called before the first `make`.
  /// \returns the index in the buffer of the gradient's first element
  std::int64_t add(std::int64_t elements) { return std::exchange(elements_, elements_ + elements); }
  /// Claims a collective for each bucket. Called before the first sum.
  /// \param bytes largest size of a bucket
  void number(collective_numbers& collectives, std::size_t bytes) {
    auto const each = static_cast<std::int64_t>(c10::elementSize(c10::toRealValueType(dtype())));
    most_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes) / each);
    first_bucket_ = collectives.claim(buckets());
  }
  int buckets() const { return static_cast<int>((numbers() + most_ - 1) / most_); }

  /// Divides the buffer into one share for each replica.
  /// \param at replicas + 1 offsets in elements, ascending, from 0 to the buffer's end \param replica this rank's replica
  void cut(std::vector<std::int64_t> at, std::size_t replica) {
    cut_ = std::move(at);
    replica_ = replica;
  }
  std::vector<std::int64_t> const& cut() const { return cut_; }

  /// Whether the whole buffer is allocated.
  bool is_there() const { return memory_.defined(); }
  /// Allocates the buffer, filled with zeros, unless it is allocated.
  void make() {
    if (!is_there()) memory_ = at::zeros({elements_}, options_);
    share_.reset();
  }
  /// Called before a step: frees a buffer with `is_freed`, sets any other buffer to zero.
  void zero() {
    share_.reset();
    if (freed_) return memory_.reset();
    make();
    memory_.zero_();
  }

  /// A view of `elements` elements from index `begin` on; while only this replica's share is allocated, the view must be in it.
  at::Tensor row(std::int64_t begin, std::int64_t elements) const {
    return is_there() ? memory_.narrow(0, begin, elements) : share_.narrow(0, begin - cut_[replica_], elements);
  }
  /// This replica's share; the whole buffer if there are no shares.
  at::Tensor own() const {
    if (cut_.empty()) return memory_;
    return row(cut_[replica_], cut_[replica_ + 1] - cut_[replica_]);
  }

  /// Starts to sum all buckets over the replicas.
  void start_sums(transport& comm) {
    if (elements_ == 0) return;
    // Neither Gloo nor NCCL sums complex numbers.
    at::Tensor const all = memory_.is_complex() ? at::view_as_real(memory_).flatten() : memory_;
    std::vector<std::int64_t> in_numbers = cut_;
    for (std::int64_t& at : in_numbers) at *= memory_.is_complex() ? 2 : 1;
    for (int b = 0; b < buckets(); ++b) {
      std::int64_t const begin = b * most_, size = std::min(most_, numbers() - begin);
      at::Tensor const values = all.narrow(0, begin, size);
      if (shared_) {
        comm.start_reduce_scatter(first_bucket_ + b, values, detail::part_of_cut(in_numbers, begin, size));
      } else {
        comm.start_all_reduce(first_bucket_ + b, values, among_);
      }
    }
  }
  /// Waits for the sums.
  void wait_sums(transport& comm) {
    for (int b = 0; b < buckets(); ++b) comm.wait_bucket(first_bucket_ + b, among_);
  }
  /// Frees the buffer except for this replica's share, if the buffer `is_freed`. Called once the sums have arrived.
  void keep_share() {
    if (!freed_ || !is_there()) return;
    at::Tensor const mine = own();
    share_ = mine.numel() == elements_ ? memory_ : mine.clone();
    memory_.reset();
  }

  /// Calls `see(tensor)` for the buffer or the share, whichever is allocated.
  template <class See>
  void each_tensor(See const& see) const {
    if (is_there()) see(memory_);
    if (share_.defined()) see(share_);
  }
  /// Bytes of the whole buffer, minus the bytes that are allocated now.
  std::int64_t bytes_freed() const {
    std::int64_t const whole = elements_ * static_cast<std::int64_t>(c10::elementSize(dtype()));
    return is_there() ? 0 : whole - (share_.defined() ? static_cast<std::int64_t>(share_.nbytes()) : 0);
  }
  /// The number of in-place changes of the allocated memory, by LibTorch's version counters.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    each_tensor([&](at::Tensor const& t) { sum += static_cast<std::int64_t>(t._version()); });
    return sum;
  }

 private:
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }
  /// The number of real numbers to be summed: a complex element counts as two.
  std::int64_t numbers() const { return elements_ * (c10::isComplexType(dtype()) ? 2 : 1); }

  at::TensorOptions options_;
  bool shared_, freed_;
  rank_group among_;
  std::int64_t elements_ = 0;
  int first_bucket_ = 0;
  std::int64_t most_ = 1;          // most real numbers in a bucket
  std::vector<std::int64_t> cut_;  // offsets of the replicas' shares; empty: no shares
  std::size_t replica_ = 0;
  at::Tensor memory_, share_;
};

/// Sums the shards' partial gradients, in shard order, in place. Called before the sums over the replicas.
/// \param parts views of a gradient buffer
inline void add_parts(tensors const& parts, transport& comm) {
  if (parts.empty()) return;
  at::NoGradGuard const off;
  at::Tensor const row = at::cat(parts);
  comm.over_group(rank_group::shards, group_collective::all_reduce, row.is_complex() ? at::view_as_real(row) : row);
  std::int64_t from = 0;
  for (at::Tensor const& part : parts) {
    part.copy_(row.narrow(0, from, part.numel()));
    from += part.numel();
  }
}

}  // namespace chevron::detail
