#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>

/// \file
/// Post-validation: which instructions of a step may run before the verdict on the step before it, on parameters that may yet be
/// taken back.

namespace chevron {

/// The beginning of one rank's part of a program that may run before it is known whether the last optimizer step stands: what
/// has only forwards before it, on its own rank and on all others. Over all ranks these beginnings are closed: nothing in
/// them waits for anything after one of them. So every rank comes to the end of its own without a verdict, and if the verdict
/// is bad, all messages of the beginnings can be taken off the channels, and the step can start over.
struct speculation {
  int end = 0;  ///< it is within the instructions [0, end) of this rank, none of which is half of a fused pair

  /// Of these instructions, those that run before the verdict, in order.
  std::vector<int> before;

  /// The others, which run after the verdict and before the instruction at `end`: receives for what is sent only then. Posted
  /// earlier, they would stand in the way of the messages of a second start.
  std::vector<int> postponed;

  /// Receives, in the order of the program, for what is sent before the verdict and not used before it: those below `end` are
  /// posted, the others are not.
  std::vector<int> unread;

  /// Sends below `end` that are not waited for below `end`.
  std::vector<int> sending;
};

/// O(instructions of all ranks × the number of times ranks wait for each other).
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
    (detail::is_receive(x.op.kind) && !sent_before ? out.postponed : out.before).push_back(i);
    if (x.op.kind == kind::send_forward) out.sending.push_back(i);
    if (x.op.kind == kind::wait_send_forward) {
      std::erase_if(out.sending, [&](int sent) { return program.at(rank, sent).source == x.source; });
    }
  }
  return out;
}

}  // namespace chevron
