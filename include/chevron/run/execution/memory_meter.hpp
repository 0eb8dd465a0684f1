#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/device/device_threads.hpp>
#include <chevron/run/execution/operation.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/trace/allocator_stats.hpp>

/// \file
/// Measures a step's memory on an accelerator, for comparison with the memory that the schedule implies.

namespace chevron {

/// Measures one rank's device memory over the steps of a training program. Measures nothing on the CPU, and nothing for programs
/// of forwards.
class memory_meter {
 public:
  /// \param where the device of the rank's stages
  memory_meter(program_view const& program, int rank, at::Device where)
      : plan_(program.plan),
        rank_(rank),
        where_(where),
        stats_(plan_.forward_only ? at::Device(at::kCPU) : where),
        retained_(static_cast<std::size_t>(plan_.stages)) {}

  ~memory_meter() { detail::own_shortage.clear(); }
  memory_meter(memory_meter const&) = delete;
  memory_meter& operator=(memory_meter const&) = delete;

  allocator_stats& stats() { return stats_; }
  bool watches() const { return stats_.watches(); }  ///< whether this meter measures
  /// Begins a step. The second step forgets the F's of the first, in which libraries allocate workspaces and keep them (cuBLAS,
  /// 32 MiB for each thread and stream on Hopper): growth that no microbatch retains.
  void begin_step() {
    stats_.begin_step();
    if (steps_ < 2 && ++steps_ == 2) std::fill(retained_.begin(), retained_.end(), 0);
  }

  /// Runs F and measures the bytes that the microbatch retains until its backward: the growth of the allocator and the inputs
  /// received for F, less outputs that are held only to be sent.
  /// \param inputs of F
  /// \param slot   to which F writes its outputs
  template <class Forward>
  void measure(instruction const& i, tensors const& inputs, activation const& slot, Forward const& forward) {
    // A tensor in main memory does not come from the device's allocator.
    auto const bytes_of = [](at::Tensor const& t) { return t.is_cpu() ? 0 : static_cast<std::int64_t>(t.storage().nbytes()); };
    std::int64_t before = stats_.in_use();
    bool const received = i.op.stage > 0 && i.local == no_slot;
    for (at::Tensor const& t : inputs) before -= received && t.defined() ? bytes_of(t) : 0;
    forward();
    std::int64_t retained = stats_.in_use() - before;
    for (at::Tensor const& t : slot.outputs) {
      if (t.defined() && t.storage().use_count() == 1) retained -= bytes_of(t);
    }
    retained_[i.op.stage] = std::max(retained_[i.op.stage], retained);
  }

  /// The allocator's figures of this step so far, beside the bytes that the schedule implies.
  /// \param captured bytes that graphs use: the allocator gave them at the capture, and sees no request at a launch
  allocator_use peak(std::int64_t captured) {
    allocator_use use = stats_.peak(peak_bytes(plan_, size_view{retained_.data(), nullptr, 1}, rank_));
    use.active = std::max(use.active, captured);
    return use;
  }

  /// Whether a `peak` so far found the device nearly full, so that the allocator may free memory in the middle of a step.
  bool is_tight() const { return stats_.is_tight(); }

  /// Ends a training step, after its `peak`: empties the allocator's cache if the next step would run out of memory. In the
  /// middle of a step this could block for ever: before the allocator frees memory, it waits for all work of the device, messages
  /// included, whose senders may wait for a call that this rank has not made yet. Between steps no work of the device waits for a
  /// call of this rank. The cache stays if other threads of the process compute on devices of this type, since they may be in the
  /// middle of a step.
  void end_step(long step) {
    if (!watches()) return;
    if (stats_.is_short() && !device_thread::share(where_.type())) stats_.empty_cache();
    detail::own_shortage = stats_.shortage(step);
  }

 private:
  plan_view plan_;
  int rank_;
  at::Device where_;
  allocator_stats stats_;
  std::vector<std::int64_t> retained_;  // bytes of a microbatch, by stage
  int steps_ = 0;                       // begun, counted up to 2
};

}  // namespace chevron
