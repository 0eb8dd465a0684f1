#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <chevron/lower/program.hpp>
#include <chevron/plan/footprint.hpp>
#include <chevron/plan/kinds.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/device/device_threads.hpp>
#include <chevron/run/execution/operation.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/trace/rank_trace.hpp>
#include <chevron/show/format.hpp>

/// \file
/// Measures a step's memory on an accelerator, for comparison with the memory that the schedule implies.

namespace chevron::detail {

/// Monitors the allocator of one device over a step.
class allocator_stats {
 public:
  explicit allocator_stats(at::Device where)
      : allocator_stats(where.is_cpu() ? nullptr : dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where.type())),
                        where.index()) {}
  /// \param from the allocator; null: nothing is monitored
  allocator_stats(c10::DeviceAllocator* from, c10::DeviceIndex index) : from_(from), index_(index) {}

  /// Whether an allocator is monitored.
  bool watches() const { return from_ != nullptr && from_->initialized(); }

  /// Resets the peaks.
  void begin_step() {
    if (!watches()) return;
    from_->resetPeakStats(index_);
    begin_ = in_use();
  }
  /// Bytes in tensors now.
  std::int64_t in_use() const { return watches() ? from_->getDeviceStats(index_).allocated_bytes[all].current : 0; }

  /// The use of memory since `begin_step`.
  /// \param kept the largest number of bytes that the schedule keeps at one time
  allocator_use peak(std::int64_t kept) {
    allocator_use out;
    if (!watches()) return out;
    auto const stats = from_->getDeviceStats(index_);
    out.active = stats.active_bytes[all].peak;
    out.reserved = stats.reserved_bytes[all].peak;
    out.planned = begin_ + kept;
    reserved_ = stats.reserved_bytes[all].current;
    if (device_.total == 0 || reserved_ > asked_at_) device_ = detail::memory_of(*from_, index_);
    asked_at_ = reserved_;
    out.total = device_.total;
    std::int64_t const growth = reserved_before_ > 0 ? reserved_ - reserved_before_ : 0;  // since the last step's end
    is_tight_ = is_tight_ || retries_ < stats.num_alloc_retries || device_.free < std::max(device_.total / 16, 2 * growth);
    retries_ = stats.num_alloc_retries;
    return out;
  }

  /// Whether, at any `peak` so far, the allocator had freed cached memory in the middle of a step, or the device had less free
  /// memory than a sixteenth of its total or twice the step's growth, so that the next step may make the allocator do so.
  bool is_tight() const { return is_tight_; }

  /// After the `peak` of a step: whether the device has too little memory for a step that grows as much as this one, so that the
  /// allocator would free cached memory in the middle of the step. False in the first step, in which all memory is growth.
  bool is_short() {
    if (!watches()) return false;
    std::int64_t const growth = reserved_ - std::exchange(reserved_before_, reserved_);
    if (growth <= 0 || growth == reserved_) return false;
    device_ = detail::memory_of(*from_, index_);
    bool const now = device_.total > 0 && growth > device_.free;
    was_short_ = was_short_ || now;
    return now;
  }
  /// Returns the cached memory of all devices of this type, after waiting for all their work.
  void empty_cache() { from_->emptyCache(); }

  /// This rank's memory after a step, for its timeout errors. Empty if memory was never short.
  std::string shortage(long step) const {
    if (!was_short_ && retries_ == 0) return {};
    std::string const of = device_.total == 0 ? ""
                                              : " of the device's " + show::bytes(device_.total) + ", with " +
                                                    show::bytes(device_.free) + " free when it last grew";
    return "after step " + std::to_string(step) + " this rank's allocator had " + show::bytes(reserved_) + of +
           ", and num_alloc_retries was " + std::to_string(retries_) +
           ": so often it gave memory back in the middle of a step, which waits for messages under way. Remedy: smaller "
           "microbatches, recompute(), or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
  }

 private:
  static constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

  c10::DeviceAllocator* from_;
  c10::DeviceIndex index_;
  std::int64_t begin_ = 0;
  detail::device_memory device_;                     // when it was last queried
  std::int64_t reserved_ = 0, reserved_before_ = 0;  // after a step, and after the one before it
  std::int64_t asked_at_ = 0;                        // reserved when device_ was queried
  std::int64_t retries_ = 0;                         // since the start of the process
  bool is_tight_ = false;
  bool was_short_ = false;
};

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
