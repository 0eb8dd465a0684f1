#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/run/model/stage_execution.hpp>

/// \file
/// Weight gradients that a rank holds back until it would have to wait.

namespace chevron {

/// The W's of one rank whose turn in the program has come and that have not run yet.
///
/// What may be held back, and until when (docs/design.md, "Weight gradients that move"): of all that comes after a W in its rank's
/// list only later W's of its stage, the sum of its stage's gradients and the optimizer's step need what it computes, and no other rank
/// needs it at all. So W's that run in their order, at most `most` turns late, and before those sums, change no message and no bit of a
/// gradient, and nobody waits longer for what this rank sends. A limit on chunks in flight or bytes that was proved of the plan is kept: an F that
/// would exceed it comes after a W that was held back.
///
/// Where a plan has R's or own actions no W is held back: their place among the W's was proved, too.
///
/// A W's work is taken out of its activation slot, which may be used again meanwhile.
class deferred_weights {
 public:
  /// A W and what it computes with.
  struct held {
    instruction const* what = nullptr;
    stage_execution work;
  };

  /// \param most how many are held back at a time; 0: none, and nothing here is used
  deferred_weights(program_view const& program, int most)
      : plan_(program.plan),
        most_(plan_.holds(kind::recompute) || plan_.has_own_kinds() ? 0 : static_cast<std::size_t>(most)) {}

  bool on() const { return most_ > 0; }
  bool empty() const { return held_.empty(); }
  bool full() const { return held_.size() >= most_; }

  /// At the start of a run.
  void begin() {
    chunks_ = 0;
    bytes_ = 0;
  }
  /// An F has begun, or a B or W has ended: of a chunk of this stage.
  void chunk_starts(action what) { count(what, 1); }
  void chunk_ends(action what) { count(what, -1); }

  /// Whether this F would exceed a limit of the plan's.
  bool exceeds_limit(action f) const {
    return (plan_.in_flight_limit > 0 && chunks_ + 1 > plan_.in_flight_limit) ||
           (plan_.byte_limit > 0 && bytes_ + plan_.stage_bytes[f.stage] > plan_.byte_limit);
  }
  bool holds_stage(action what) const {
    for (held const& one : held_) {
      if (one.what->op.stage == what.stage) return true;
    }
    return false;
  }

  /// A W whose turn has come.
  /// \param work of its slot, in whose place comes the work of another that is done
  void hold(instruction const& w, stage_execution& work) {
    held_.push_back({&w, std::move(work)});
    work = {};
    if (spare_.empty()) return;
    work = std::move(spare_.back());
    spare_.pop_back();
  }
  /// The first of those that are held back; not to be called where none is.
  held next() {
    held out = std::move(held_.front());
    held_.pop_front();
    return out;
  }
  void done(held one) { spare_.push_back(std::move(one.work)); }

 private:
  void count(action what, int by) {
    chunks_ += by;
    if (plan_.byte_limit > 0) bytes_ += by * plan_.stage_bytes[what.stage];
  }

  plan_view plan_;
  std::size_t most_;
  std::deque<held> held_;
  std::vector<stage_execution> spare_;
  int chunks_ = 0;          // in flight, those of W's that are held back included
  std::int64_t bytes_ = 0;  // of them
};

}  // namespace chevron
