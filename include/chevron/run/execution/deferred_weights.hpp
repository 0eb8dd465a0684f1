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
#include <chevron/run/execution/operation.hpp>
#include <chevron/run/model/stage_execution.hpp>

/// \file
/// Weight gradients that a rank holds back until it would have to wait.

namespace chevron {

/// The W's of one rank whose turn in the program has come and that have not run yet.
///
/// What may be held back, and until when (docs/design.md, "Weight gradients that move"): of all that comes after a W in its
/// rank's list only later W's of its stage, the sum of its stage's gradients and the optimizer's step need what it computes, and
/// no other rank needs it at all. So W's that run in their order, at most `most` turns late, and before those sums, change no
/// message and no bit of a gradient, and nobody waits longer for what this rank sends. A limit on chunks in flight or bytes that
/// was proved of the plan is kept: an F that would exceed it comes after a W that was held back.
///
/// Where a plan has R's or own actions no W is held back: their place among the W's was proved, too.
///
/// A W's work is taken out of its activation slot, which may be used again meanwhile.
class deferred_weights {
 public:
  /// \param most how many are held back at a time, from 1
  deferred_weights(program_view const& program, transport& comm, int most)
      : plan_(program.plan), comm_(&comm), most_(static_cast<std::size_t>(most)) {}

  bool empty() const { return held_.empty(); }
  bool full() const { return held_.size() >= most_; }

  /// At the start of a run.
  void begin() {
    chunks_ = 0;
    bytes_ = 0;
  }
  /// An operation has run: counts the chunks in flight.
  void note(action what) {
    int const by = in_flight_change(what.kind, plan_.forward_only);
    chunks_ += by;
    if (plan_.byte_limit > 0) bytes_ += by * plan_.stage_bytes[what.stage];
  }

  /// Whether W's that are held back go before this instruction.
  /// \param reduces whether the sums of gradients over the replicas start in this run
  bool go_before(instruction const& i, bool reduces) const {
    switch (i.op.kind) {
      case kind::forward:
        return exceeds_limit(i.op) || is_missing(i);
      case kind::backward:
        // It adds to the gradients, too: after the W's that come before it, for the same bits.
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

  /// A W whose turn has come.
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
  /// The first of those that are held back: to be run, and then `let_go`.
  operation const& first() const { return held_.front().w; }
  void let_go() {
    note(first().what->op);
    spare_.push_back(std::move(held_.front().slot.work));
    held_.pop_front();
  }

 private:
  /// A W with the work that it computes with.
  struct held {
    operation w;
    activation slot;
  };

  bool is_missing(instruction const& i) const { return i.source != no_slot && !comm_->has_arrived(i.source); }
  /// Whether this F would exceed a limit of the plan's.
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
  std::deque<held> held_;  // where each stays as others come and go
  std::vector<stage_execution> spare_;
  int chunks_ = 0;          // in flight, those of W's that are held back included
  std::int64_t bytes_ = 0;  // of them
};

}  // namespace chevron
