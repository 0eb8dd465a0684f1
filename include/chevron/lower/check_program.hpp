#pragma once

#include <chevron/lower/check_slots.hpp>
#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// The laws on a program: each rank computes what the plan says; sends and receives match one to one, on each directed edge in
/// the same order; no slot is read before it is filled or written while its content is needed; every tensor is freed; and with
/// rendezvous sends on one in-order channel for each directed edge no rank waits for ever.

namespace chevron {

namespace detail {

/// Checks each instruction by itself: its stage, microbatch, peer and slots exist, each where the instruction needs it. The
/// checks that follow may use these numbers as indices.
constexpr finding check_instructions(program_view const& program) {
  plan_view const& plan = program.plan;
  for (int r = 0; r < plan.size.ranks; ++r) {
    slot_counts const counts = program.slots[r];
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& one = program.instructions[i];
      action a = one.op;
      if (is_of_stage(a.kind)) a.micro_batch = 0;
      finding f = program_finding(law::ids_in_range, r, i - program.begin[r], a);
      if (static_cast<int>(a.kind) >= program_kinds) {
        f.words = " is no instruction; kinds: ", f.limit = program_kinds;
        return f;
      }
      if (a.kind == kind::optimizer_step) continue;
      int const stage = static_cast<int>(a.stage);
      if (stage >= plan.stages || static_cast<int>(a.micro_batch) >= plan.size.units() || plan.rank_of[stage] != r)
        return misplaced(plan, f);
      if (is_of_stage(a.kind)) continue;
      if (is_own(a.kind)) continue;
      if (is_compute(a.kind)) {
        int const from = step_graph(plan).from(a);
        bool const local = from >= 0 && plan.rank_of[from] == r;
        bool const remote = from >= 0 && !local;
        if (one.slot >= counts.activation)
          f.words = " names an activation slot that this rank does not have; activation slots: ", f.limit = counts.activation;
        else if (local && one.local >= counts.activation)
          f.words = " takes its input from this rank, but not from one of its activation slots; there are ",
          f.limit = counts.activation;
        else if (remote && one.source >= counts.receive)
          f.words = " takes its input from another rank, but not from one of this rank's receive slots; there are ",
          f.limit = counts.receive;
        else if (row_of(a.kind).from != 0 && ((!local && one.local != no_slot) || (!remote && one.source != no_slot)))
          f.words = " names an activation or receive slot that does not hold its input; stages: ", f.limit = plan.stages;
        else
          continue;
        return f;
      }
      int const peer_stage = step_graph(plan).other_end(a);
      if (peer_stage < 0)
        f.words = " has no peer; stages: ", f.limit = plan.stages;
      else if (plan.rank_of[peer_stage] == r)
        f.words = " is a message of a rank to itself: the stage at its other end is on this rank too, rank ", f.other_rank = r;
      else if (one.peer != plan.rank_of[peer_stage])
        f.words = " names another peer than the rank of the stage at its other end, rank ",
        f.other_rank = plan.rank_of[peer_stage];
      else if (is_receive(a.kind) ? one.source >= counts.receive : one.source >= counts.send)
        f.words = is_receive(a.kind) ? " names a receive slot that this rank does not have; receive slots: "
                                     : " names a send slot that this rank does not have; send slots: ",
        f.limit = is_receive(a.kind) ? counts.receive : counts.send;
      else if (is_send(a.kind) && one.slot >= counts.activation)
        f.words = " names an activation slot that this rank does not have; activation slots: ", f.limit = counts.activation;
      else
        continue;
      return f;
    }
  }
  return {};
}

/// Checks that each rank runs its plan's actions in their order, each after the UNSHARD of its stage, and that a rank unshards
/// each stage once, sums each stage's gradients once, after the last of the stage's microbatches, and steps once.
constexpr finding check_computations(program_view const& program) {
  plan_view const& plan = program.plan;
  buffer<int> left(plan.stages);  // by stage: microbatches without gradients so far; -1: gradients summed
  for (int s = 0; s < plan.stages; ++s) left.data[s] = plan.size.units();
  buffer<bool> whole(plan.stages, plan.forward_only);  // by stage: its UNSHARD has run
  for (int r = 0; r < plan.size.ranks; ++r) {
    int next = plan.begin[r];
    bool stepped = false;
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      action const a = program.instructions[i].op;
      int const at = i - program.begin[r];
      // The finding for a needed action that comes too late, or never.
      auto const early = [&](action needed, char const* why) {
        for (int j = i + 1; j < program.begin[r + 1]; ++j) {
          if (program.instructions[j].op == needed) return program_finding(law::order, r, at, a, "", needed);
        }
        return program_finding(law::complete, r, -1, needed, why);
      };
      if (a.fused != 0 && !is_compute(a.kind))
        return program_finding(law::fused_pair, r, at, a, " is marked as half of a fused pair, but only computations are paired");
      if (is_compute(a.kind)) {
        if (next == plan.begin[r + 1])
          return program_finding(law::no_duplicate, r, at, a, " comes after the plan's last action of this rank");
        action const planned = plan.actions[next];
        if (!(a == planned) || a.fused != planned.fused)
          return program_finding(law::complete, r, at, planned, "the plan has this action here, and the program another one");
        if (!whole.data[static_cast<int>(a.stage)])
          return early(make_action(kind::unshard, static_cast<int>(a.stage), 0), "every stage's parameters are unsharded once");
        ++next;
        if (a.fused != 0 && i + 1 < program.begin[r + 1] && !is_compute(program.instructions[i + 1].op.kind)) {
          finding f =
              program_finding(law::fused_pair, r, at, a, " is the first half of a fused pair, but before the second comes ",
                              program.instructions[i + 1].op);
          f.links = 1;
          return f;
        }
        if (ends_cell(a.kind)) --left.data[static_cast<int>(a.stage)];
      } else if (is_of_stage(a.kind) || a.kind == kind::optimizer_step) {
        if (plan.forward_only) return program_finding(law::no_duplicate, r, at, a, " has no place in a forward-only program");
        bool const again = a.kind == kind::optimizer_step ? stepped
                           : a.kind == kind::unshard      ? whole.data[static_cast<int>(a.stage)]
                                                          : left.data[static_cast<int>(a.stage)] < 0;
        if (again) return program_finding(law::no_duplicate, r, at, a, " comes a second time");
        if (a.kind == kind::unshard) {
          whole.data[static_cast<int>(a.stage)] = true;
        } else if (a.kind == kind::reduce_gradients) {
          int& gradients = left.data[static_cast<int>(a.stage)];
          for (int j = next; j < plan.begin[r + 1] && gradients > 0; ++j) {
            action const later = plan.actions[j];
            if (ends_cell(later.kind) && later.stage == a.stage)
              return early(later, "the plan has this action, and the program does not");
          }
          gradients = -1;
        } else {
          for (int s = 0; s < plan.stages; ++s) {
            if (plan.rank_of[s] == r && left.data[s] >= 0)
              return early(make_action(kind::reduce_gradients, s, 0), "every stage's gradients are summed once");
          }
          stepped = true;
        }
      }
    }
    if (next < plan.begin[r + 1])
      return program_finding(law::complete, r, -1, plan.actions[next], "the plan has this action, and the program does not");
    if (plan.forward_only) continue;
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] == r && left.data[s] >= 0)
        return program_finding(law::complete, r, -1, make_action(kind::reduce_gradients, s, 0),
                               "every stage's gradients are summed once");
    }
    if (!stepped) return program_finding(law::complete, r, -1, make_action(kind::optimizer_step, 0, 0), "every rank steps once");
  }
  return {};
}

/// Checks that the k-th send and the k-th posted receive of each directed edge are the same message.
constexpr finding check_channels(program_view const& program) {
  int const ranks = program.plan.size.ranks;
  // Each edge's receives in their order: linked lists of instructions by index + 1; 0: end of list.
  buffer<int> first_memory(ranks * ranks, zeroed), next_memory(program.total());
  int* const first = first_memory.data;
  int* const next = next_memory.data;
  for (int r = ranks - 1; r >= 0; --r) {
    for (int i = program.begin[r + 1] - 1; i >= program.begin[r]; --i) {
      instruction const& one = program.instructions[i];
      if (!is_receive(one.op.kind)) continue;
      int& edge = first[one.peer * ranks + r];
      next[i] = edge;
      edge = i + 1;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& send = program.instructions[i];
      if (!is_send(send.op.kind)) continue;
      int& edge = first[r * ranks + send.peer];
      action const wanted = receive_of(send.op);
      if (edge == 0)
        return program_finding(law::matched, r, i - program.begin[r], send.op, " is never received: no rank posts ", wanted);
      int const posted = edge - 1;
      if (!(program.instructions[posted].op == wanted)) {
        return program_finding(law::matched, send.peer, posted - program.begin[send.peer], program.instructions[posted].op,
                               " is posted where this edge delivers ", wanted);
      }
      edge = next[posted];
    }
  }
  for (int edge = 0; edge < ranks * ranks; ++edge) {
    if (first[edge] == 0) continue;
    int const posted = first[edge] - 1;
    int const r = edge % ranks;
    action const receive = program.instructions[posted].op;
    return program_finding(law::matched, r, posted - program.begin[r], receive, " is never sent: there is no ", send_of(receive));
  }
  return {};
}

/// The instruction of another rank for which a blocked instruction waits: a computation for a send, a WAIT_SEND for a receive.
constexpr action needed_of_peer(action a) {
  if (is_wait(a.kind)) return receive_of(send_of_wait(a));
  return send_of(receive_for(a));
}

/// Plays the program with rendezvous sends: a computation waits until the send and the receive of its input are posted, a
/// WAIT_SEND until the send's receive is posted. No other instruction blocks. A finding if ranks wait for each other for ever.
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

}  // namespace detail

/// The first broken law: of the plan, or else of the program; `law::none` if both are lawful.
constexpr finding check(program_view const& program) {
  if (finding const f = check(program.plan)) return f;
  finding f = detail::check_instructions(program);
  if (!f) f = detail::check_computations(program);
  if (!f) f = detail::check_channels(program);
  if (!f) f = detail::check_slots(program);
  if (!f) f = detail::check_program_progress(program);
  f.slices = program.plan.size.slices;
  return f;
}

}  // namespace chevron
