#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <chevron/plan/action.hpp>
#include <chevron/run/core/now_ns.hpp>

/// \file
/// Records a rank's steps: each instruction with its times.

namespace chevron {

/// One executed instruction; times in ns, by now_ns(). Between `reached` and `start` the rank waited for other ranks.
struct trace_event {
  action op{};
  std::int64_t reached = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
};

/// Figures of LibTorch's allocator for a device, in bytes, over all ranks of this process that use the device. All 0 on the CPU.
struct allocator_use {
  std::int64_t active = 0;    ///< peak bytes of tensors, including freed tensors that a stream still uses
  std::int64_t reserved = 0;  ///< peak bytes that the allocator had reserved on the device
  std::int64_t planned = 0;   ///< bytes before the step, plus the most bytes of activations that the schedule keeps at once
  std::int64_t total = 0;     ///< the device's memory; 0 with LibTorch 2.9, which does not report it

  /// Sets each figure to the larger of its value and the value in `other`.
  void add(allocator_use const& other) {
    active = other.active > active ? other.active : active;
    reserved = other.reserved > reserved ? other.reserved : reserved;
    planned = other.planned > planned ? other.planned : planned;
    total = other.total > total ? other.total : total;
  }
};

/// A copy of a recorded instruction, for another thread.
struct last_action {
  trace_event event{};
  long step = -1;
  bool under_way = false;  ///< the instruction has begun, and its end is not recorded yet
};

/// The record of a rank's last two steps: one entry per instruction, in order. `reserve` allocates all memory. Functions return
/// the last step; only `flight_log` also returns the step before, since a rank may fail in the first action of a step.
class rank_trace {
 public:
  /// Allocates memory for steps of up to this many instructions.
  void reserve(std::size_t instructions) {
    for (one_step& each : steps_) each.entries.resize(instructions);
  }

  /// Begins the record of a step; the oldest of the two records is overwritten.
  void begin_step(long step) {
    put(now_, 1 - now_);
    one_step& now = steps_[now_];
    put(now.count, std::size_t{0});
    put(now.step, step);
    in_flight_ = 0;
    peak_in_flight_ = 0;
    memory_ = {};
    put(now.begin, now_ns());
  }

  /// Drops the entries of the current step, which starts over, and keeps its begin time.
  void start_over() {
    put(steps_[now_].count, std::size_t{0});
    in_flight_ = 0;
    peak_in_flight_ = 0;
  }

  /// Appends an entry for action `what` and returns its index. Its `end` equals `reached` until `ends(index)` is called.
  std::size_t add(action what) {
    one_step& now = steps_[now_];
    std::size_t const entry = now.count;
    if (entry == now.entries.size()) now.entries.resize(std::max<std::size_t>(16, 2 * entry));
    trace_event& one = now.entries[entry];
    std::int64_t const reached = now_ns();
    put(one.op, what);
    for (std::int64_t* const time : {&one.reached, &one.start, &one.end}) put(*time, reached);
    put(now.count, entry + 1);
    return entry;
  }
  /// Sets an entry's start to the current time. \param entry index by `add`
  void starts(std::size_t entry) { put(steps_[now_].entries[entry].start, now_ns()); }
  void ends(std::size_t entry) { put(steps_[now_].entries[entry].end, now_ns()); }  ///< sets the end of `entry`
  /// Sets an entry's times to those at which an accelerator ran it, instead of those at which the host enqueued it.
  void computed(std::size_t entry, std::int64_t start, std::int64_t end) {
    put(steps_[now_].entries[entry].start, start);
    put(steps_[now_].entries[entry].end, end);
  }

  void took(allocator_use const& memory) { memory_ = memory; }  ///< sets the last step's memory figures
  /// Adds `by`, which may be negative, to the number of chunks in flight; called when an action changes that number.
  void chunks_change(int by) {
    in_flight_ += by;
    peak_in_flight_ = std::max(peak_in_flight_, in_flight_);
  }

  long step() const { return steps_[now_].step; }                 ///< number of the last step; -1 before the first
  std::int64_t begin() const { return get(steps_[now_].begin); }  ///< begin of the last step, in ns
  /// The entries of the last step.
  std::span<trace_event const> entries() const { return {steps_[now_].entries.data(), steps_[now_].count}; }
  /// Copies the entries of the step before the last, then of the last. Another thread may call `flight_log` while the rank
  /// runs; the copy may then mix entries of a step that has just begun with older entries. `reserve` must have allocated enough
  /// for all entries.
  std::vector<last_action> flight_log() const {
    std::vector<last_action> out;
    unsigned const now = get(now_);
    for (unsigned const which : {1 - now, now}) {
      one_step const& from = steps_[which];
      std::size_t const count = std::min(get(from.count), from.entries.size());
      for (std::size_t i = 0; i < count; ++i) {
        trace_event const& one = from.entries[i];
        trace_event const seen{get(one.op), get(one.reached), get(one.start), get(one.end)};
        // Only the last two entries can be unfinished: the halves of a fused pair may run at the same time.
        bool const may_be = which == now && i + 2 >= count;
        out.push_back({seen, get(from.step), may_be && seen.end <= seen.reached});
      }
    }
    return out;
  }
  /// The most chunks that were in flight at one time: between their F and their B or W.
  int peak_in_flight() const { return peak_in_flight_; }
  allocator_use const& memory() const { return memory_; }  ///< memory figures of the last step

  /// \returns seconds of the last step in which at least one computation ran (the halves of a fused pair may overlap)
  double busy_seconds() const {
    std::int64_t sum = 0, from = 0, until = 0;  // the last interval filled by computations without a gap
    for (trace_event const& r : entries()) {
      if (!is_compute(r.op.kind)) continue;
      if (r.end < from) {  // the second recorded half of a fused pair may run first
        sum += r.end - r.start;
      } else if (r.start > until) {
        sum += until - from;
        from = r.start;
        until = r.end;
      } else {
        from = std::min(from, r.start);
        until = std::max(until, r.end);
      }
    }
    return static_cast<double>(sum + until - from) * 1e-9;
  }
  /// \returns seconds from the beginning of the last step to the end of its last computation
  double span_seconds() const {
    std::int64_t last = begin();
    for (trace_event const& r : entries()) last = is_compute(r.op.kind) && r.end > last ? r.end : last;
    return static_cast<double>(last - begin()) * 1e-9;
  }

 private:
  struct one_step {
    std::vector<trace_event> entries;  // `count` of them are used
    std::size_t count = 0;
    long step = -1;
    std::int64_t begin = 0;
  };

  // Accesses are atomic, since a second thread reads the record for a failing rank's flight log; on current processors atomic
  // loads and stores cost nothing.
  template <class T>
  static void put(T& at, T value) {
    std::atomic_ref<T>(at).store(value, std::memory_order_release);
  }
  template <class T>
  static T get(T const& at) {
    return std::atomic_ref<T>(const_cast<T&>(at)).load(std::memory_order_acquire);
  }

  std::array<one_step, 2> steps_;
  unsigned now_ = 0;
  int in_flight_ = 0;
  int peak_in_flight_ = 0;
  allocator_use memory_;
};

}  // namespace chevron
