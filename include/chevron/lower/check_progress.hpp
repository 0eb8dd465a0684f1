#pragma once

#include <cstdint>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// The law of progress: with rendezvous sends on one in-order channel for each directed edge no rank waits for ever.

namespace chevron::detail {

/// What a blocked instruction needs of another rank: a compute its send, a wait its receive.
constexpr action needed_of_peer(plan_view const& plan, action a) {
  if (is_wait(a.kind)) return receive_of(send_of_wait(a));
  return make_action(a.kind == kind::forward ? kind::send_forward : kind::send_backward, input_stage(plan, a),
                     static_cast<int>(a.micro_batch));
}

/// Runs the program with rendezvous sends: a computation needs its receive's send to be posted, a wait needs its send's
/// receive to be posted. Everything else never blocks.
constexpr finding check_program_progress(program_view const& program) {
  plan_view const& plan = program.plan;
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.micro_batches;
  int const cells = plan.stages * micro_batches;
  buffer<std::uint8_t> sent_memory(2 * cells, zeroed), posted_memory(2 * cells, zeroed);  // by producer message
  std::uint8_t* const sent = sent_memory.data;
  std::uint8_t* const posted = posted_memory.data;
  buffer<int> next_memory(ranks);
  int* const next = next_memory.data;
  for (int r = 0; r < ranks; ++r) next[r] = program.begin[r];
  bool moved = true;
  while (moved) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      for (; next[r] < program.begin[r + 1]; ++next[r]) {
        action const a = program.instructions[next[r]].op;
        int const cell = static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch);
        if (a.kind == kind::send_forward) sent[cell] = 1;
        if (a.kind == kind::send_backward) sent[cells + cell] = 1;
        if (a.kind == kind::receive_forward) posted[cell - micro_batches] = 1;
        if (a.kind == kind::receive_backward) posted[cells + cell + micro_batches] = 1;
        if (a.kind == kind::wait_send_forward && posted[cell] == 0) break;
        if (a.kind == kind::wait_send_backward && posted[cells + cell] == 0) break;
        if (int const from = input_stage(plan, a); from >= 0 && plan.rank_of[from] != r) {
          int const message = a.kind == kind::forward ? cell - micro_batches : cells + cell + micro_batches;
          if (sent[message] == 0 || posted[message] == 0) break;
        }
        moved = true;
      }
    }
  }
  int stuck = -1;
  for (int r = ranks - 1; r >= 0; --r) {
    if (next[r] < program.begin[r + 1]) stuck = r;
  }
  if (stuck < 0) return {};

  // As in a plan: each stuck rank waits for what another has behind its own next instruction; the chain ends in a cycle.
  auto const needed = [&](int r) { return needed_of_peer(plan, program.instructions[next[r]].op); };
  auto const waits_for = [&](int r) { return static_cast<int>(plan.rank_of[static_cast<int>(needed(r).stage)]); };
  int walker = stuck;
  for (int hop = 0; hop < ranks; ++hop) walker = waits_for(walker);
  int lowest = walker, links = 0, at = walker;
  do {
    at = waits_for(at);
    lowest = at < lowest ? at : lowest;
    ++links;
  } while (at != walker);
  finding f = program_finding(law::deadlock, lowest, next[lowest] - program.begin[lowest], program.instructions[next[lowest]].op,
                              "", needed(lowest));
  f.links = links;
  f.other_rank = waits_for(lowest);
  f.behind = program.instructions[next[f.other_rank]].op;
  f.then = needed(f.other_rank);
  int previous = lowest;
  for (int hop = 0; hop + 1 < links; ++hop) previous = waits_for(previous);
  f.last_behind = needed(previous);
  return f;
}

}  // namespace chevron::detail
