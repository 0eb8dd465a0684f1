#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/plan/footprint.hpp>
#include <chevron/plan/kinds.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/device/device_threads.hpp>
#include <chevron/run/execution/operation.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/trace/allocator_stats.hpp>

/// \file
/// Measures a step's memory on an accelerator, for comparison with the memory that the schedule implies.

namespace chevron::detail {

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
        bytes_(static_cast<std::size_t>(plan_.stages)) {}

  ~memory_meter() { detail::own_shortage.clear(); }
  memory_meter(memory_meter const&) = delete;
  memory_meter& operator=(memory_meter const&) = delete;

  allocator_stats& stats() { return stats_; }
  bool watches() const { return stats_.watches(); }  ///< whether this meter measures
  /// Begins a step. The second step forgets what the first one measured, in which libraries allocate workspaces and keep them
  /// (cuBLAS, 32 MiB for each thread and stream on Hopper): growth that no microbatch retains.
  void begin_step() {
    stats_.begin_step();
    if (steps_ < 2 && ++steps_ == 2) std::fill(bytes_.begin(), bytes_.end(), of_stage{});
  }

  /// Runs F, R or I and measures the bytes that the microbatch then holds: the growth of the allocator and the tensors received
  /// for the computation, less results that are held only to be sent. I gives back a part of what F retained, and keeps gradients
  /// for W.
  /// \param given inputs of F, or gradients of outputs for I
  /// \param slot  to which the computation writes its results
  template <class Compute>
  void measure(instruction const& i, tensors const& given, activation& slot, Compute const& compute) {
    // A tensor in main memory does not come from the device's allocator.
    auto const bytes_of = [](at::Tensor const& t) { return t.is_cpu() ? 0 : static_cast<std::int64_t>(t.storage().nbytes()); };
    kind const what = i.op.kind;
    int const from = static_cast<int>(i.op.stage) + row_of(what).from;
    bool const received = row_of(what).from != 0 && from >= 0 && from < plan_.stages && i.local == no_slot;
    std::int64_t before = stats_.in_use();
    for (at::Tensor const& t : given) before -= received && t.defined() ? bytes_of(t) : 0;
    compute();
    std::int64_t grown = stats_.in_use() - before;
    if (row_of(what).to != 0) {
      for (at::Tensor const& t : slot.result(row_of(what).to)) {
        if (t.defined() && t.storage().use_count() == 1) grown -= bytes_of(t);
      }
    }
    of_stage& s = bytes_[i.op.stage];
    if (what == kind::forward) s.after_forward = std::max(s.after_forward, grown);
    if (what == kind::recompute) s.recomputed = std::max(s.recomputed, grown);
    if (what == kind::backward_input) s.kept = std::max(s.kept.value_or(grown), grown);
  }

  /// The allocator's figures of this step so far, beside the bytes that the schedule implies.
  /// \param captured bytes that graphs use: the allocator gave them at the capture, and sees no request at a launch
  allocator_use peak(std::int64_t captured) {
    std::vector<std::int64_t> const fixed(bytes_.size());
    std::vector<std::int64_t> input, activation, kept;
    for (of_stage const& s : bytes_) {
      input.push_back(s.after_forward);
      activation.push_back(s.after_forward + s.recomputed);
      kept.push_back(activation.back() + s.kept.value_or(0));
    }
    footprint_view const of{.fixed = fixed.data(), .activation = activation.data(), .kept = kept.data(), .input = input.data()};
    allocator_use use = stats_.peak(peak_memory(plan_, of, rank_));
    use.active = std::max(use.active, captured);
    return use;
  }

  /// Whether a `peak` so far found the device nearly full, so that the allocator may free memory in the middle of a step.
  bool is_tight() const { return stats_.is_tight(); }

  /// Ends a training step, after its `peak`: empties the allocator's cache if the next step would run out of memory. In the
  /// middle of a step the allocator would wait for messages under way, whose senders may wait for a call of this rank; so the
  /// cache stays if other threads of the process compute on devices of this type.
  void end_step(long step) {
    if (!watches()) return;
    if (stats_.is_short() && !device_thread::share(where_.type())) stats_.empty_cache();
    detail::own_shortage = stats_.shortage(step);
  }

 private:
  /// Bytes of a stage's microbatch; of several microbatches the most.
  struct of_stage {
    std::int64_t after_forward = 0;
    std::int64_t recomputed = 0;            // by how much R makes them more
    std::optional<std::int64_t> kept = {};  // by how much I makes them more; negative: less
  };

  plan_view plan_;
  int rank_;
  at::Device where_;
  allocator_stats stats_;
  std::vector<of_stage> bytes_;
  int steps_ = 0;                       // begun, counted up to 2
};

}  // namespace chevron::detail
