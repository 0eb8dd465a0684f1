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
/// The record of a rank's steps: its instructions, with times.

namespace chevron {

/// One instruction as it ran; times in ns, as by now_ns(). Between `reached` and `start` the rank waited for other ranks.
struct trace_event {
  action op{};
  std::int64_t reached = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
};

/// Figures of LibTorch's allocator for a device, in bytes, over all ranks of this process that use the device. All 0 on the CPU.
struct allocator_use {
  std::int64_t active = 0;    ///< most at one time in tensors, including those that a stream still uses
  std::int64_t reserved = 0;  ///< most at one time that the allocator held from the device
  std::int64_t planned = 0;   ///< bytes before the step, plus the most bytes of activations that the schedule keeps at one time
  std::int64_t total = 0;     ///< the device's memory; 0 where LibTorch (2.9) does not tell it

  /// Takes, for each figure, the larger of this value and of that of `other`.
  void add(allocator_use const& other) {
    active = other.active > active ? other.active : active;
    reserved = other.reserved > reserved ? other.reserved : reserved;
    planned = other.planned > planned ? other.planned : planned;
    total = other.total > total ? other.total : total;
  }
};

/// An instruction in the record, as another thread reads it.
struct last_action {
  trace_event event{};
  long step = -1;
  bool under_way = false;  ///< it has begun and its end is not recorded
};

/// The record of a rank's last two steps: one entry for each instruction, in order. Memory is reserved once. Functions read the
/// last step; only `flight_log` reads the step before too, since a rank may fail in the first action of a step.
class rank_trace {
 public:
  /// Reserves memory for a step of so many instructions.
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

  /// Drops the entries of a step that begins again; its begin time stays.
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
  /// Notes that an entry's operation starts, or ends, now. \param entry index by `add`
  void starts(std::size_t entry) { put(steps_[now_].entries[entry].start, now_ns()); }
  void ends(std::size_t entry) { put(steps_[now_].entries[entry].end, now_ns()); }  ///< as `starts`, for the end of `entry`
  /// Sets the times at which an accelerator ran an entry, instead of those at which the host enqueued it.
  void computed(std::size_t entry, std::int64_t start, std::int64_t end) {
    put(steps_[now_].entries[entry].start, start);
    put(steps_[now_].entries[entry].end, end);
  }

  void took(allocator_use const& memory) { memory_ = memory; }  ///< sets the step's memory figures
  /// Records that an action changed the number of chunks in flight by this many.
  void chunks_change(int by) {
    in_flight_ += by;
    peak_in_flight_ = std::max(peak_in_flight_, in_flight_);
  }

  long step() const { return steps_[now_].step; }                 ///< number of the last step; -1 before the first
  std::int64_t begin() const { return get(steps_[now_].begin); }  ///< of the last step, in ns
  /// The entries of the last step.
  std::span<trace_event const> entries() const { return {steps_[now_].entries.data(), steps_[now_].count}; }
  /// The entries of the last step and the one before. Another thread may call this while the rank goes on, and may then get
  /// entries of a step that has just begun together with older ones. Memory must have been reserved for all entries.
  std::vector<last_action> flight_log() const {
    std::vector<last_action> out;
    unsigned const now = get(now_);
    for (unsigned const which : {1 - now, now}) {
      one_step const& from = steps_[which];
      std::size_t const count = std::min(get(from.count), from.entries.size());
      for (std::size_t i = 0; i < count; ++i) {
        trace_event const& one = from.entries[i];
        trace_event const seen{get(one.op), get(one.reached), get(one.start), get(one.end)};
        // Only the last two entries can be unfinished: they may be the two halves of a fused pair, which run at once.
        bool const may_be = which == now && i + 2 >= count;
        out.push_back({seen, get(from.step), may_be && seen.end <= seen.reached});
      }
    }
    return out;
  }
  /// The most chunks at one time between their F and their B or W.
  int peak_in_flight() const { return peak_in_flight_; }
  allocator_use const& memory() const { return memory_; }  ///< of the last step

  /// \returns seconds in which at least one F, B, I or W ran: the halves of a fused pair may run at once
  double busy_seconds() const {
    std::int64_t sum = 0, from = 0, until = 0;  // the time that the last computations fill without a gap
    for (trace_event const& r : entries()) {
      if (!is_compute(r.op.kind)) continue;
      if (r.end < from) {  // of a fused pair the half that is recorded second may run first
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
  /// \returns seconds from the beginning of the step to the end of its last F, B, I or W
  double span_seconds() const {
    std::int64_t last = begin();
    for (trace_event const& r : entries()) last = is_compute(r.op.kind) && r.end > last ? r.end : last;
    return static_cast<double>(last - begin()) * 1e-9;
  }

 private:
  struct one_step {
    std::vector<trace_event> entries;  // all reserved entries
    std::size_t count = 0;
    long step = -1;
    std::int64_t begin = 0;
  };

  // Atomic accesses, since a second thread reads the record for a failing rank's flight log; on current processors they cost
  // nothing.
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
