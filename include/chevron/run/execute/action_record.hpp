#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/stage_failure.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/core/flight_log.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/core/rank_trace.hpp>

/// \file
/// Times a rank's actions, and adds rank, step and action to their errors.

namespace chevron::detail {

/// Surrounds every action of one rank: adds an entry to the trace, adds rank, step and action to errors, and lets tests make
/// the action fail. An accelerator's times come from two events for each computation, which later steps reuse; on the CPU the
/// host's clock is exact.
class action_record {
 public:
  action_record(transport& comm, program_view const& program, at::Device where)
      : comm_(&comm), slices_(program.plan.size.slices), where_(where), kept_(comm.topology(), program.plan, shared_) {
    trace_.reserve(static_cast<std::size_t>(program.length(comm.topology().pipeline_rank())));
  }

  rank_trace& trace() { return trace_; }
  rank_trace const& trace() const { return trace_; }
  long step() const { return trace_.step(); }
  int slices() const { return slices_; }  ///< the plan's number of slices of a microbatch

  /// Begins the trace of a step.
  void begin_step(long step) {
    trace_.begin_step(step);
    next_ = 0;
    notes_.clear();
    if (where_.is_cpu()) return;
    begin_ns_ = now_ns();
    begin_ = mark();
  }
  /// Empties the trace, as the step starts over.
  void start_over() {
    trace_.start_over();
    notes_.clear();
  }
  /// Waits for the accelerator, and writes the accelerator's times to the trace.
  void settle() {
    for (note const& n : notes_) {
      if (n.end == none) continue;
      wait_for(events_[n.end]);
      trace_.computed(n.entry, at(n.start), at(n.end));
    }
    notes_.clear();
  }

  /// Adds an action that begins now to the trace. \returns the index of the action's entry in the trace
  std::size_t add(instruction const& i) { return trace_.add(i.op); }
  /// Records the start of a computation: the host's time and, on an accelerator, an event on the current stream.
  void starts(std::size_t entry) {
    trace_.starts(entry);
    if (!where_.is_cpu()) notes_.push_back({entry, mark(), none});
  }
  /// Records the end of a computation: the host's time and, on an accelerator, an event on the current stream.
  void ends(std::size_t entry) {
    auto const noted = std::find_if(notes_.rbegin(), notes_.rend(), [&](note const& n) { return n.entry == entry; });
    if (noted != notes_.rend()) noted->end = mark();
    trace_.ends(entry);
  }

  /// Points before and after an action at which tests can make the action fail.
  void before(instruction const& i) const { detail::fault_point(comm_->topology().global_rank, step(), "before", i.op); }
  void after(instruction const& i) const { detail::fault_point(comm_->topology().global_rank, step(), "after", i.op); }

  /// Runs a part of an action. Adds rank, step and action to an exception, and reports it to all ranks (stage_failure.hpp).
  template <class Work>
  void guard(instruction const& i, Work const& work) const {
    try {
      work();
    } catch (...) {
      rethrow(i);
    }
  }
  /// Runs a part of an action that may fail without failing the step: adds rank, step and action to an exception, but does not
  /// report it to other ranks.
  template <class Work>
  void guard_alone(instruction const& i, Work const& work) const {
    try {
      work();
    } catch (...) {
      detail::rethrow_placed(nullptr, thrower(i), at_action(i));
    }
  }
  /// Called in a `catch`: adds rank, step and action to the exception, reports it to all ranks, and rethrows it.
  [[noreturn]] void rethrow(instruction const& i) const { detail::rethrow_placed(comm_, thrower(i), at_action(i)); }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct note {
    std::size_t entry, start, end;  // index in the trace; indices in `events_`
  };

  std::size_t mark() {
    if (next_ == events_.size()) events_.emplace_back(where_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_[next_].record(c10::impl::VirtualGuardImpl(where_.type()).getStream(where_));
    return next_++;
  }
  std::int64_t at(std::size_t event) const {
    return begin_ns_ + static_cast<std::int64_t>(events_[begin_].elapsedTime(events_[event]) * 1e6);
  }
  error_context at_action(instruction const& i) const {
    return {comm_->topology().global_rank, -1, step(), to_text(i.op, slices_).str()};
  }
  static std::string thrower(instruction const& i) {
    if (is_own(i.op.kind)) return "own_actions threw: ";
    return is_compute(i.op.kind) ? "stage " + std::to_string(i.op.stage) + " threw: " : std::string();
  }

  transport* comm_;
  int slices_;                                                           // of a microbatch
  std::shared_ptr<rank_trace> shared_ = std::make_shared<rank_trace>();  // outlives this object if the rank fails
  rank_trace& trace_ = *shared_;
  at::Device where_;
  std::deque<c10::Event> events_;
  std::vector<note> notes_;  // of computations on an accelerator
  std::size_t next_ = 0, begin_ = 0;
  std::int64_t begin_ns_ = 0;
  detail::flight_recorder kept_;
};

}  // namespace chevron::detail
