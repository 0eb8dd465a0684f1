#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <chevron/plan/action.hpp>

/// \file
/// What a rank really did in a step, and when.

namespace chevron {

/// Nanoseconds of the steady clock: comparable between the threads of a process and between processes of one machine.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One instruction as it ran. From `reached` to `start` the rank waited for what it needed from others.
struct trace_event {
  action op{};
  std::int64_t reached = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
};

/// Bytes of a device, as LibTorch's allocator counts them: for all ranks of this process that use the device together. All 0 on
/// the CPU.
struct allocator_use {
  std::int64_t active = 0;    ///< most at one time in tensors, those that a stream still uses included
  std::int64_t reserved = 0;  ///< most at one time that the allocator had taken from the device
  std::int64_t planned = 0;   ///< what the step began with, and the most that the schedule keeps on top: activations in flight
  std::int64_t total = 0;     ///< of the device

  /// The most of either.
  void add(allocator_use const& other) {
    active = other.active > active ? other.active : active;
    reserved = other.reserved > reserved ? other.reserved : reserved;
    planned = other.planned > planned ? other.planned : planned;
    total = other.total > total ? other.total : total;
  }
};

/// The record of a rank's last step: one entry an instruction, in order. Memory is set aside once.
class rank_trace {
 public:
  void reserve(std::size_t instructions) { entries_.reserve(instructions); }

  void begin_step(long step) {
    step_ = step;
    entries_.clear();
    in_flight_ = 0;
    peak_in_flight_ = 0;
    memory_ = {};
    begin_ = now_ns();
  }

  /// The step begins again: what was noted is void, except for when it began.
  void start_over() {
    entries_.clear();
    in_flight_ = 0;
    peak_in_flight_ = 0;
  }

  /// Gives the new entry's number. It ends when it is reached until it is said to end.
  std::size_t add(action what) {
    std::int64_t const now = now_ns();
    entries_.push_back({what, now, now, now});
    return entries_.size() - 1;
  }
  void starts(std::size_t entry) { entries_[entry].start = now_ns(); }
  void ends(std::size_t entry) { entries_[entry].end = now_ns(); }
  /// An accelerator computed it then, not when its host asked for it.
  void computed(std::size_t entry, std::int64_t start, std::int64_t end) {
    entries_[entry].start = start;
    entries_[entry].end = end;
  }

  void took(allocator_use const& memory) { memory_ = memory; }
  void chunk_starts() { peak_in_flight_ = ++in_flight_ > peak_in_flight_ ? in_flight_ : peak_in_flight_; }
  void chunk_ends() { --in_flight_; }

  long step() const { return step_; }
  std::int64_t begin() const { return begin_; }
  std::span<trace_event const> entries() const { return entries_; }
  /// Most chunks that were between their F and their B or W at one time.
  int peak_in_flight() const { return peak_in_flight_; }
  allocator_use const& memory() const { return memory_; }

  /// Seconds spent on F, B, I and W, without waiting.
  double busy_seconds() const {
    std::int64_t sum = 0;
    for (trace_event const& r : entries_) sum += is_compute(r.op.kind) ? r.end - r.start : 0;
    return static_cast<double>(sum) * 1e-9;
  }
  /// Seconds from the beginning of the step to the end of its last F, B, I or W.
  double span_seconds() const {
    std::int64_t last = begin_;
    for (trace_event const& r : entries_) last = is_compute(r.op.kind) && r.end > last ? r.end : last;
    return static_cast<double>(last - begin_) * 1e-9;
  }

 private:
  std::vector<trace_event> entries_;
  long step_ = -1;
  std::int64_t begin_ = 0;
  int in_flight_ = 0;
  int peak_in_flight_ = 0;
  allocator_use memory_;
};

}  // namespace chevron
