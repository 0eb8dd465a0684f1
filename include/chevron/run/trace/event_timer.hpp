#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// Measures when an accelerator ran the operations that its host had enqueued.

namespace chevron {

/// Times the computations of a step by two events each, which are reused. No effect on the CPU, where the host's clock is exact.
class event_timer {
 public:
  explicit event_timer(at::Device where) : where_(where) {}

  void begin_step() {
    next_ = 0;
    notes_.clear();
    if (where_.is_cpu()) return;
    begin_ns_ = now_ns();
    begin_ = mark();
  }
  /// Drops the times of this step so far.
  void start_over() { notes_.clear(); }
  /// Notes that an entry of the record starts, or ends, at this point of the current stream.
  void starts(std::size_t entry) {
    if (!where_.is_cpu()) notes_.push_back({entry, mark(), none});
  }
  void ends(std::size_t entry) {
    if (where_.is_cpu()) return;
    for (std::size_t i = notes_.size(); i-- > 0;) {
      if (notes_[i].entry != entry) continue;
      notes_[i].end = mark();
      return;
    }
  }
  /// Waits until all noted computations have run, and writes their times into the record.
  void settle(rank_trace& into) {
    if (where_.is_cpu() || notes_.empty()) return;
    for (note const& n : notes_) {
      if (n.end == none) continue;
      wait_for(events_[n.end]);
      into.computed(n.entry, at(n.start), at(n.end));
    }
    notes_.clear();
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct note {
    std::size_t entry, start, end;
  };

  std::size_t mark() {
    if (next_ == events_.size()) events_.emplace_back(where_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_[next_].record(c10::impl::VirtualGuardImpl(where_.type()).getStream(where_));
    return next_++;
  }
  std::int64_t at(std::size_t event) const {
    return begin_ns_ + static_cast<std::int64_t>(events_[begin_].elapsedTime(events_[event]) * 1e6);
  }

  at::Device where_;
  std::deque<c10::Event> events_;
  std::vector<note> notes_;
  std::size_t next_ = 0, begin_ = 0;
  std::int64_t begin_ns_ = 0;
};

}  // namespace chevron
