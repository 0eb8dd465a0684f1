#pragma once

#include <cstdint>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/wait_cycle.hpp>

/// \file
/// The law of progress: with rendezvous sends on one in-order channel for each directed edge no rank waits for ever.

namespace chevron::detail {

/// What a blocked instruction needs of another rank: a compute its send, a wait its receive.
constexpr action needed_of_peer(action a) {
  if (is_wait(a.kind)) return receive_of(send_of_wait(a));
  return send_of(receive_for(a));
}

/// Runs the program with rendezvous sends: a computation needs its receive's send to be posted, a wait needs its send's
/// receive to be posted. Everything else never blocks.
constexpr finding check_program_progress(program_view const& program) {
  plan_view const& plan = program.plan;
  int const ranks = plan.size.ranks;
  step_graph const graph(plan);
  buffer<std::uint8_t> sent_memory(graph.results(), zeroed), posted_memory(graph.results(), zeroed);
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
        if (is_send(a.kind)) sent[graph.makes(a)] = 1;
        if (is_receive(a.kind)) posted[graph.needs(a)] = 1;
        if (is_wait(a.kind) && posted[graph.makes(a)] == 0) break;
        if (is_compute(a.kind) && graph.comes_over(a) >= 0 && (sent[graph.needs(a)] == 0 || posted[graph.needs(a)] == 0)) break;
        moved = true;
      }
    }
  }
  auto const queued = [&](int rank) { return program.instructions[next[rank]].op; };
  return deadlock_of(plan, program.begin, next, queued, [&](int rank) { return needed_of_peer(queued(rank)); });
}

}  // namespace chevron::detail
