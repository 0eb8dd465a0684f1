#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Snapshots of modules' buffers (running means of a normalization …), so that forwards can be run again, and the broadcast of
/// buffers over the copies of a stage, as replicas see different samples.

namespace chevron::detail {

/// Copies values to a tensor of equal shape. Shared elements of `to` (an expanded tensor) are written once.
inline void copy_into(at::Tensor to, at::Tensor from) {
  for (std::int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) != 0 || to.size(d) < 2) continue;
    to = to.narrow(d, 0, 1);
    from = from.narrow(d, 0, 1);
  }
  to.copy_(from);
}

/// A copy of the buffers of stages. Random numbers need no snapshot: they depend on step, stage and microbatch only.
class buffer_snapshot {
 public:
  buffer_snapshot() = default;

  explicit buffer_snapshot(std::span<stage const> stages) {
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.value.defined()) buffers_.push_back({b.value, {}});
      }
    }
  }

  /// Copies the buffers, into the memory of the last copy if sizes are equal.
  void take() {
    at::NoGradGuard const off;
    for (auto& [buffer, copy] : buffers_) {
      if (copy.defined() && copy.sizes() == buffer.sizes()) {
        copy.copy_(buffer);
      } else {
        copy = buffer.clone(at::MemoryFormat::Contiguous);
      }
    }
  }

  /// Restores the values of the last `take`. The writes do not change version counters, since autograd may have saved a buffer.
  /// \param except buffers that keep their values; empty: none
  void put_back(std::vector<bool> const& except = {}) {
    at::NoGradGuard const off;
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      if (!except.empty() && except[i]) continue;
      detail::copy_into(buffers_[i].first.variable_data(), buffers_[i].second);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

/// Copies buffers from one rank of a group to all members, bit for bit, by a gather in which the first member's share is all
/// bytes. Module code may resize buffers between two copies.
class buffer_broadcast {
 public:
  /// \param among the group; `gives` on its first member \param bucket number of the collective, among those of the group
  buffer_broadcast(rank_group among, topology const& where, at::Device device, int bucket)
      : among_(where.plain(among)), device_(device), bucket_(bucket), gives_(where.number_in(among) == 0) {}

  /// Adds a buffer, which has the same dtype and sizes on all members.
  void add(at::Tensor const& buffer) { buffers_.push_back(buffer); }

  /// Starts the gather. Call it when no computation of the step still reads or writes a buffer. Collective over the group.
  void start(transport& comm) {
    if (buffers_.empty()) return;
    at::NoGradGuard const off;
    lay_out();
    if (gives_) {
      for (std::size_t i = 0; i < buffers_.size(); ++i) places_[i].copy_(buffers_[i]);
    }
    std::vector<std::int64_t> cut(static_cast<std::size_t>(comm.topology().members(among_)) + 1, bytes_.numel());
    cut.front() = 0;
    comm.start_share_gather(bucket_, bytes_, cut, among_);
  }

  /// Waits for the gather, and copies the gathered values to the buffers. To be called before the next forward.
  void finish(transport& comm) {
    if (buffers_.empty()) return;
    comm.wait_bucket(bucket_, among_);
    if (gives_) return;
    at::NoGradGuard const off;
    for (std::size_t i = 0; i < buffers_.size(); ++i) detail::copy_into(buffers_[i], places_[i]);
  }

 private:
  /// Assigns each buffer a range of `bytes_`; does so again after a module has resized a buffer.
  void lay_out() {
    bool fits = places_.size() == buffers_.size();
    for (std::size_t i = 0; fits && i < buffers_.size(); ++i) fits = places_[i].sizes() == buffers_[i].sizes();
    if (fits) return;
    constexpr std::int64_t apart = 16;  // no dtype is larger
    std::vector<std::int64_t> begins{0};
    for (at::Tensor const& b : buffers_)
      begins.push_back((begins.back() + static_cast<std::int64_t>(b.nbytes()) + apart - 1) / apart * apart);
    bytes_ = at::zeros({begins.back()}, at::TensorOptions(at::kByte).device(device_));
    places_.clear();
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      at::Tensor const& of = buffers_[i];
      places_.push_back(
          bytes_.narrow(0, begins[i], static_cast<std::int64_t>(of.nbytes())).view(of.scalar_type()).view(of.sizes()));
    }
  }

  rank_group among_;
  at::Device device_;
  int bucket_;
  bool gives_;
  std::vector<at::Tensor> buffers_;
  at::Tensor bytes_;                // bytes of all buffers, one buffer after another
  std::vector<at::Tensor> places_;  // views of `bytes_`, by buffer
};

/// Copies the buffers of stages from the first copy of each stage to all copies: from replica 0 to all replicas, and experts'
/// buffers (`stage::experts`) from the first expert group to the ranks that hold the same experts in other groups. So between
/// two steps a stage is equal on all its copies, and checkpoints and evaluation may use any copy.
class replica_buffers {
 public:
  /// Copies no buffers.
  replica_buffers() = default;

  /// \param device of this rank's stages \param bucket number of the collectives, one in each group
  replica_buffers(std::vector<stage> const& stages, topology const& where, at::Device device, int bucket) {
    if (where.replicas == 1) return;
    copies_.emplace_back(rank_group::replicas, where, device, bucket);
    if (where.expert_replicas > 1) copies_.emplace_back(rank_group::expert_copies, where, device, bucket);
    std::set<void const*> seen;
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.summed) continue;  // summed_buffers.hpp
        bool const of_experts = where.expert_replicas > 1 && b.held == over_shards::cut && b.cut_over == rank_group::experts;
        if (where.members(of_experts ? rank_group::expert_copies : rank_group::replicas) == 1) continue;
        if (b.value.defined() && b.value.numel() > 0 && seen.insert(b.value.unsafeGetTensorImpl()).second)
          copies_[of_experts ? 1 : 0].add(b.value);
      }
    }
  }

  /// Starts the copies (`buffer_broadcast::start`). Collective.
  void start(transport& comm) {
    for (buffer_broadcast& one : copies_) one.start(comm);
  }
  /// Ends the copies (`buffer_broadcast::finish`).
  void finish(transport& comm) {
    for (buffer_broadcast& one : copies_) one.finish(comm);
  }

 private:
  std::vector<buffer_broadcast> copies_;  // over the replicas; over the copies of experts
};

}  // namespace chevron::detail
