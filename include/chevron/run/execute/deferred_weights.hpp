#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/execute/operation.hpp>
#include <chevron/run/stage/stage_execution.hpp>

/// \file
/// Holds back a rank's computations of weight gradients (W's) until an operation would have to wait.

namespace chevron::detail {

/// The W's of one rank that are held back: they run later than the program says. Messages and all bits of gradients are
/// unchanged, and the plan's limits are observed (docs/design.md, "Weight gradients that move").
///
/// In a plan with R's or with X, Y or Z no W is held back, since the proof covers the order of these actions and W's, too.
///
/// `hold` moves a W's data out of its activation slot, which another microbatch may then use.
class deferred_weights {
 public:
  /// \param most the largest number of W's held back at a time, from 1
  deferred_weights(program_view const& program, transport& comm, int most)
      : plan_(program.plan), comm_(&comm), most_(static_cast<std::size_t>(most)) {}

  bool empty() const { return held_.empty(); }
  bool full() const { return held_.size() >= most_; }

  /// Begins a run: no chunk is in flight.
  void begin() {
    chunks_ = 0;
    bytes_ = 0;
  }
  /// Updates the number of chunks in flight, and their bytes, after an operation.
  void note(action what) {
    int const by = in_flight_change(what.kind, plan_.forward_only);
    chunks_ += by;
    if (plan_.byte_limit > 0) bytes_ += by * plan_.stage_bytes[what.stage];
  }

  /// Whether to run a held W before this instruction, since the instruction must run after the W or would have to wait.
  /// \param reduces whether the sums of gradients over the replicas start in this run
  bool go_before(instruction const& i, bool reduces) const {
    switch (i.op.kind) {
      case kind::forward:
        return exceeds_limit(i.op) || is_missing(i);
      case kind::backward:
        // B also adds to the gradients: after all W's that the plan has before B, so that the bits are the same.
        return holds_stage(i.op) || is_missing(i);
      case kind::backward_input:
        return is_missing(i);
      case kind::wait_send_forward:
      case kind::wait_send_backward:
        return !comm_->is_sent(i.source);
      case kind::reduce_gradients:
        return reduces && holds_stage(i.op);
      default:
        return false;
    }
  }

  /// Holds back a W that the program would run now.
  void hold(operation const& w) {
    held& one = held_.emplace_back();
    one.w = w;
    one.w.slot = &one.slot;
    if (!spare_.empty()) {
      one.slot.work = std::move(spare_.back());
      spare_.pop_back();
    }
    std::swap(one.slot.work, w.slot->work);
  }
  /// The oldest held W: to be run, then removed by `let_go`.
  operation const& first() const { return held_.front().w; }
  /// Removes the oldest held W, which has run.
  void let_go() {
    note(first().what->op);
    spare_.push_back(std::move(held_.front().slot.work));
    held_.pop_front();
  }

 private:
  /// A held W, with the data that were in its slot.
  struct held {
    operation w;
    activation slot;
  };

  /// Whether the message that a computation needs has not come yet.
  bool is_missing(instruction const& i) const { return i.source != no_slot && !comm_->has_arrived(i.source); }
  /// Whether this F would exceed a limit of the plan.
  bool exceeds_limit(action f) const {
    return (plan_.in_flight_limit > 0 && chunks_ + 1 > plan_.in_flight_limit) ||
           (plan_.byte_limit > 0 && bytes_ + plan_.stage_bytes[f.stage] > plan_.byte_limit);
  }
  bool holds_stage(action what) const {
    return std::any_of(held_.begin(), held_.end(), [&](held const& one) { return one.w.what->op.stage == what.stage; });
  }

  plan_view plan_;
  transport* comm_;
  std::size_t most_;
  std::deque<held> held_;  // elements keep their addresses, to which the operations' slots point
  std::vector<stage_execution> spare_;
  int chunks_ = 0;          // in flight, chunks of held W's included
  std::int64_t bytes_ = 0;  // bytes of the chunks in flight
};

}  // namespace chevron::detail
