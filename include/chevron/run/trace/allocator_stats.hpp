#pragma once

#include <cstdint>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// How much of an accelerator's memory a step takes.

namespace chevron {

/// Watches the allocator of one device over a step.
class allocator_stats {
 public:
  explicit allocator_stats(at::Device where)
      : allocator_stats(where.is_cpu() ? nullptr : dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(where.type())),
                        where.index()) {}
  /// \param from null: nothing is watched
  allocator_stats(c10::DeviceAllocator* from, c10::DeviceIndex index) : from_(from), index_(index) {}

  bool watches() const { return from_ != nullptr && from_->initialized(); }

  /// From here on the peak counts.
  void begin_step() {
    if (!watches()) return;
    from_->resetPeakStats(index_);
    begin_ = in_use();
  }
  /// Bytes in tensors now.
  std::int64_t in_use() const { return watches() ? from_->getDeviceStats(index_).allocated_bytes[all].current : 0; }

  /// Since `begin_step`.
  /// \param kept the most bytes that the schedule keeps at one time
  allocator_use peak(std::int64_t kept) {
    allocator_use out;
    if (!watches()) return out;
    auto const stats = from_->getDeviceStats(index_);
    out.active = stats.active_bytes[all].peak;
    out.reserved = stats.reserved_bytes[all].peak;
    out.planned = begin_ + kept;
    if (total_ == 0) total_ = detail::device_bytes(*from_, index_);
    out.total = total_;
    return out;
  }

 private:
  static constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

  c10::DeviceAllocator* from_;
  c10::DeviceIndex index_;
  std::int64_t begin_ = 0, total_ = 0;
};

}  // namespace chevron
