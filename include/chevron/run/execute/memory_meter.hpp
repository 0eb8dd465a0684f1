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
#include <chevron/run/core/allocator_stats.hpp>
#include <chevron/run/core/device_threads.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/execute/operation.hpp>

/// \file
/// Measures a step's memory on an accelerator, for comparison with the memory that the schedule implies.

namespace chevron::detail {

/// Measures one rank's device memory over the steps of a training program. Measures nothing on the CPU, and nothing for
/// programs that only run forward.
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
  /// Begins a step. At the second step, discards what the first step measured: in the first step, libraries allocate permanent
  /// workspaces (cuBLAS, 32 MiB for each thread and stream on Hopper), which do not belong to a microbatch.
  void begin_step() {
    stats_.begin_step();
    if (steps_ < 2 && ++steps_ == 2) std::fill(bytes_.begin(), bytes_.end(), of_stage{});
  }

  /// Runs F, R or I and measures the growth of the microbatch's memory: the allocator's growth, plus the tensors received for
  /// the computation, minus results that are stored only to be sent. I frees a part of F's tensors, and stores gradients for W.
  /// \param given inputs of F, or gradients of outputs for I
  /// \param slot the slot to which the computation writes results
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

  /// The allocator's figures of this step so far, with the bytes that the schedule implies.
  /// \param captured bytes that graphs use: allocated at the capture, so launches do not change the allocator's figures
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

  /// Ends a training step; call it after the step's `peak`. Empties the allocator's cache if the next step would run out of
  /// memory: otherwise the allocator would do so in the middle of the step, and wait for unfinished messages, whose senders may
  /// wait for a call of this rank. To avoid such a wait here, the cache is not emptied if other threads of the process compute
  /// on devices of this type.
  void end_step(long step) {
    if (!watches()) return;
    if (stats_.is_short() && !device_thread::share(where_.type())) stats_.empty_cache();
    detail::own_shortage = stats_.shortage(step);
  }

 private:
  /// The bytes of one microbatch in a stage: the maximum over all microbatches.
  struct of_stage {
    std::int64_t after_forward = 0;
    std::int64_t recomputed = 0;            // growth in R
    std::optional<std::int64_t> kept = {};  // growth in I; negative: I frees memory
  };

  plan_view plan_;
  int rank_;
  at::Device where_;
  allocator_stats stats_;
  std::vector<of_stage> bytes_;
  int steps_ = 0;                       // number of steps begun, at most 2
};

}  // namespace chevron::detail
