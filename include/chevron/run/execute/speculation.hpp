#pragma once

#include <cstddef>
#include <vector>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>

/// \file
/// Post-validation (arXiv 2401.10241, section 4): finds the instructions of a step that may run before the verdict whether the
/// previous step is valid, on parameters that a bad verdict restores.

namespace chevron::detail {

/// The beginning of one rank's program that may run before the verdict on the last optimizer step: forwards with only forwards
/// before them, on this rank and on all ranks whose messages they need, directly or through other ranks. No instruction of any
/// rank's beginning waits for an instruction that is in no rank's beginning. So every rank reaches the end of its beginning
/// without a verdict; after a bad verdict, ranks can receive and drop all messages of the beginnings, and start the step over.
/// Members are positions in the rank's program.
struct speculation {
  int end = 0;  ///< all instructions of the beginning are in [0, end); none of these is half of a fused pair

  /// The instructions below `end` that run before the verdict, in order.
  std::vector<int> before;

  /// The instructions below `end` that run after the verdict: receives of messages that are sent only after the verdict. If
  /// such a receive were posted before a bad verdict, it would get a message of the step that starts over.
  std::vector<int> postponed;

  /// Receives, in the order of the program, of messages that are sent before the verdict and used after the verdict. Receives
  /// below `end` are posted before the verdict, all later receives after it.
  std::vector<int> unread;

  /// Sends below `end` whose wait is not below `end`.
  std::vector<int> sending;
};

/// \returns the beginning of the program of `rank`; takes O(instructions of all ranks × the number of waits between ranks)
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
        // A fused pair is one action: the F must start together with the B or I.
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
