#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <chevron/base/format.hpp>
#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/core/rank_trace.hpp>

/// \file
/// Reads how much memory an accelerator's allocator uses during a step.

namespace chevron::detail {

/// Reads the allocator's statistics of one device, step by step.
class allocator_stats {
 public:
  explicit allocator_stats(at::Device where)
      : allocator_stats(where.is_cpu() ? nullptr : dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where.type())),
                        where.index()) {}
  /// \param from the allocator to read; null: every figure is 0
  allocator_stats(c10::DeviceAllocator* from, c10::DeviceIndex index) : from_(from), index_(index) {}

  /// Whether there is an allocator to read.
  bool watches() const { return from_ != nullptr && from_->initialized(); }

  /// Resets the allocator's peak figures, as a step begins.
  void begin_step() {
    if (!watches()) return;
    from_->resetPeakStats(index_);
    begin_ = in_use();
  }
  /// Bytes of tensors allocated now.
  std::int64_t in_use() const { return watches() ? from_->getDeviceStats(index_).allocated_bytes[all].current : 0; }

  /// Returns the peak use of memory since `begin_step`.
  /// \param kept the most bytes of activations that the schedule keeps at one time
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
    std::int64_t const growth = reserved_before_ > 0 ? reserved_ - reserved_before_ : 0;  // since the previous step's end
    is_tight_ = is_tight_ || retries_ < stats.num_alloc_retries || device_.free < std::max(device_.total / 16, 2 * growth);
    retries_ = stats.num_alloc_retries;
    return out;
  }

  /// Whether any call of `peak` so far found that the allocator had freed cached memory in the middle of a step, or may soon do
  /// so: the device's free memory was less than a sixteenth of its total, or than twice the growth of the step.
  bool is_tight() const { return is_tight_; }

  /// Called after a step's `peak`: whether free memory is less than the step's growth, so that the allocator would free cached
  /// memory in the middle of a step that grows as much. False after the first step, in which all memory is growth.
  bool is_short() {
    if (!watches()) return false;
    std::int64_t const growth = reserved_ - std::exchange(reserved_before_, reserved_);
    if (growth <= 0 || growth == reserved_) return false;
    device_ = detail::memory_of(*from_, index_);
    bool const now = device_.total > 0 && growth > device_.free;
    was_short_ = was_short_ || now;
    return now;
  }
  /// Waits for all work of the devices of this type, then frees the allocator's cached memory on them.
  void empty_cache() { from_->emptyCache(); }

  /// A text about this rank's memory after a step, for the rank's timeout errors; empty if memory was never short.
  std::string shortage(long step) const {
    if (!was_short_ && retries_ == 0) return {};
    std::string const of = device_.total == 0 ? ""
                                              : " of the device's " + show::bytes(device_.total) + ", with " +
                                                    show::bytes(device_.free) + " free when it last grew";
    return "after step " + std::to_string(step) + " this rank's allocator had " + show::bytes(reserved_) + of +
           ", and num_alloc_retries was " + std::to_string(retries_) +
           ": so many times the allocator freed its cache in the middle of a step, and waited for messages under way. Remedy: "
           "smaller microbatches, recompute(), or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
  }

 private:
  static constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

  c10::DeviceAllocator* from_;
  c10::DeviceIndex index_;
  std::int64_t begin_ = 0;
  detail::device_memory device_;                     // at the last query
  std::int64_t reserved_ = 0, reserved_before_ = 0;  // bytes after the last step, and after the step before
  std::int64_t asked_at_ = 0;                        // reserved_ at the last query of device_
  std::int64_t retries_ = 0;                         // num_alloc_retries since the process started
  bool is_tight_ = false;
  bool was_short_ = false;
};

}  // namespace chevron::detail
