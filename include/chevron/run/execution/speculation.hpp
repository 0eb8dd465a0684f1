#pragma once

#include <cstddef>
#include <vector>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>

/// \file
/// Post-validation (arXiv 2401.10241, section 4): finds the instructions of a step that may run before the verdict on the
/// previous step, on parameters that the verdict may restore.

namespace chevron::detail {

/// The beginning of one rank's program that may run before the verdict on the last optimizer step: forwards with only forwards
/// before them, on this rank and on all ranks whose messages they need, directly or by way of further ranks. These beginnings are
/// complete over all ranks: no instruction of a beginning waits for an instruction outside of the beginnings. So every rank
/// reaches the end of its beginning without a verdict, and after a bad verdict all messages of the beginnings can be taken off
/// the channels, and the step can start over. Members are positions in the rank's program.
struct speculation {
  int end = 0;  ///< the beginning is within the instructions [0, end) of this rank, none of which is half of a fused pair

  /// The instructions below `end` that run before the verdict, in order.
  std::vector<int> before;

  /// The instructions below `end` that run after the verdict: receives of messages that are sent only after the verdict. Posted
  /// earlier, these receives would take the messages of a second start.
  std::vector<int> postponed;

  /// Receives, in the order of the program, of messages that are sent before the verdict and used after it: receives below `end`
  /// are posted before the verdict, all others are not.
  std::vector<int> unread;

  /// Sends below `end` whose wait is not below `end`.
  std::vector<int> sending;
};

/// \returns the beginning of a rank, in O(instructions of all ranks × the number of times ranks wait for each other)
inline speculation speculation_of(program_view const& program, int rank) {
  plan_view const& plan = program.plan;
  auto const ranks = static_cast<std::size_t>(plan.size.ranks);
  auto const cell = [&](int stage, action a) {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(plan.size.units()) + a.micro_batch;
  };
  std::vector<bool> done(static_cast<std::size_t>(plan.stages * plan.size.units()));
  std::vector<int> ends(ranks);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      int& i = ends[r];
      for (; i < program.length(static_cast<int>(r)); ++i) {
        action const a = program.at(static_cast<int>(r), i).op;
        if (a.kind == kind::reduce_gradients || a.kind == kind::optimizer_step) break;
        if (!is_compute(a.kind)) continue;
        // A fused pair is one action: its forward starts with its backward.
        if (a.kind != kind::forward || a.fused != 0) break;
        auto const stage = static_cast<int>(a.stage);
        if (stage > 0 && !done[cell(stage - 1, a)]) break;
        done[cell(stage, a)] = true;
        moved = true;
      }
    }
  }

  speculation out;
  out.end = ends[static_cast<std::size_t>(rank)];
  for (int i = 0; i < program.length(rank); ++i) {
    instruction const& x = program.at(rank, i);
    auto const stage = static_cast<int>(x.op.stage);
    bool const sent_before = x.op.kind == kind::receive_forward && done[cell(stage - 1, x.op)];
    if (sent_before && !done[cell(stage, x.op)]) out.unread.push_back(i);
    if (i >= out.end) continue;
    (is_receive(x.op.kind) && !sent_before ? out.postponed : out.before).push_back(i);
    if (x.op.kind == kind::send_forward) out.sending.push_back(i);
    if (x.op.kind == kind::wait_send_forward) {
      std::erase_if(out.sending, [&](int sent) { return program.at(rank, sent).source == x.source; });
    }
  }
  return out;
}

}  // namespace chevron::detail
