#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Sums over the replicas of buffers to which forwards add, such as counts of tokens (`stage::summed`).

namespace chevron::detail {

/// Adds up the changes that a step's forwards made to the buffers of a rank's stages that are declared `summed`. Replica 0
/// contributes its values, all other replicas contribute the differences from the values at the step's begin; every replica
/// gets the sum, so replicas are equal to the last bit after each step. Sums are computed in float64.
///
/// Pieces of experts (`stage::experts`) are summed over the ranks that have the same experts, all other buffers over the
/// replicas. Costs nothing without such a buffer.
class summed_buffers {
 public:
  /// No buffers.
  summed_buffers() = default;

  /// \param device of this rank's stages \param bucket number of the collective, in each group
  summed_buffers(std::vector<stage> const& stages, topology const& where, at::Device device, int bucket) : bucket_(bucket) {
    std::set<void const*> seen;
    for (rank_group const among : {rank_group::replicas, rank_group::expert_copies}) {
      group one{.among = among, .gives_value = where.number_in(among) == 0};
      for (stage const& s : stages) {
        for (parameter const& b : s.buffers()) {
          bool const of_experts = b.held == over_shards::cut && b.cut_over == rank_group::experts && where.expert_replicas > 1;
          if (!b.summed || of_experts != (among == rank_group::expert_copies)) continue;
          if (b.value.numel() > 0 && seen.insert(b.value.unsafeGetTensorImpl()).second) one.buffers.push_back({b.value});
        }
      }
      std::int64_t numbers = 0;
      for (counted const& each : one.buffers) numbers += each.buffer.numel();
      if (numbers == 0 || where.members(among) == 1) continue;
      one.sums = at::zeros({numbers}, at::TensorOptions(at::kDouble).device(device));
      groups_.push_back(std::move(one));
    }
  }

  /// Stores the values before the first forward of a step. Called again for a step whose forwards run again.
  void begin() {
    at::NoGradGuard const off;
    for (group& one : groups_) {
      if (one.gives_value) continue;
      for (counted& each : one.buffers) {
        each.before = each.buffer.clone(at::MemoryFormat::Contiguous);
        if (each.dropped.defined()) each.before.sub_(each.dropped);
      }
    }
  }
  /// Keeps the changes of forwards whose gradients are dropped: the next sum contains them, as a loop's own buffer would.
  void drop() {
    at::NoGradGuard const off;
    for (group& one : groups_) {
      if (one.gives_value) continue;
      for (counted& each : one.buffers) each.dropped = each.buffer - each.before;
    }
  }

  /// Starts the sums. Call it when no computation of the step still reads or writes a buffer. Collective over the replicas.
  void start(transport& comm) {
    at::NoGradGuard const off;
    for (group& one : groups_) {
      std::int64_t at = 0;
      for (counted const& each : one.buffers) {
        at::Tensor const place = one.sums.narrow(0, at, each.buffer.numel()).view(each.buffer.sizes());
        place.copy_(each.buffer);
        if (!one.gives_value) place.sub_(each.before);
        at += each.buffer.numel();
      }
      comm.start_all_reduce(bucket_, one.sums, one.among);
    }
  }

  /// Waits for the sums, and writes them to the buffers. To be called before the next forward.
  void finish(transport& comm) {
    at::NoGradGuard const off;
    for (group& one : groups_) {
      comm.wait_bucket(bucket_, one.among);
      std::int64_t at = 0;
      for (counted const& each : one.buffers) {
        detail::copy_into(each.buffer, one.sums.narrow(0, at, each.buffer.numel()).view(each.buffer.sizes()));
        at += each.buffer.numel();
      }
      for (counted& each : one.buffers) each.dropped.reset();
    }
  }

 private:
  struct counted {
    at::Tensor buffer;
    at::Tensor before = {};   // at the begin of the step, less `dropped`
    at::Tensor dropped = {};  // changes by forwards whose gradients were dropped since the last sum
  };
  struct group {
    rank_group among = rank_group::replicas;
    bool gives_value = true;  // the first member, whose values are the base of the sum
    std::vector<counted> buffers = {};
    at::Tensor sums = {};  // the values of all buffers, one buffer after another
  };

  int bucket_ = 0;
  std::vector<group> groups_;
};

}  // namespace chevron::detail
