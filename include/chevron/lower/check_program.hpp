#pragma once

#include <cstdint>

#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// The laws on a program: it computes what its plan says; sends and receives match one to one, on each directed edge in one
/// order; no slot is read before it is filled or written while its content is needed; every tensor is let go; and with rendezvous
/// sends on one in-order channel for each directed edge no rank waits for ever.

namespace chevron {

namespace detail {

constexpr action receive_of(action send) {
  return send.what == kind::send_forward
             ? make_action(kind::receive_forward, static_cast<int>(send.stage) + 1, static_cast<int>(send.micro_batch))
             : make_action(kind::receive_backward, static_cast<int>(send.stage) - 1, static_cast<int>(send.micro_batch));
}
constexpr action send_of(action receive) {
  return receive.what == kind::receive_forward
             ? make_action(kind::send_forward, static_cast<int>(receive.stage) - 1, static_cast<int>(receive.micro_batch))
             : make_action(kind::send_backward, static_cast<int>(receive.stage) + 1, static_cast<int>(receive.micro_batch));
}
/// The send that a wait is for.
constexpr action send_of_wait(action wait) {
  return make_action(wait.what == kind::wait_send_forward ? kind::send_forward : kind::send_backward,
                     static_cast<int>(wait.stage), static_cast<int>(wait.micro_batch));
}

constexpr finding program_finding(law broken, int rank, int position, action what, char const* words = "", action other = {}) {
  finding f;
  f.broken = broken;
  f.rank = rank;
  f.position = position;
  f.what = what;
  f.words = words;
  f.other = other;
  return f;
}

constexpr bool is_send(kind what) { return what == kind::send_forward || what == kind::send_backward; }
constexpr bool is_receive(kind what) { return what == kind::receive_forward || what == kind::receive_backward; }
constexpr bool is_wait(kind what) { return what == kind::wait_send_forward || what == kind::wait_send_backward; }

/// The stage that an action's input comes from, by way of another rank or not; -1: from none.
constexpr int input_stage(plan_view const& plan, action a) {
  int const stage = static_cast<int>(a.stage);
  if (a.what == kind::forward) return stage - 1;
  if (a.what == kind::backward || a.what == kind::backward_input) return stage + 1 < plan.stages ? stage + 1 : -1;
  return -1;
}

/// The stage at the other end of a message; -1: there is none.
constexpr int other_end(plan_view const& plan, action message) {
  bool const up =
      message.what == kind::send_forward || message.what == kind::wait_send_forward || message.what == kind::receive_backward;
  int const stage = static_cast<int>(message.stage) + (up ? 1 : -1);
  return stage < plan.stages ? stage : -1;
}

/// Instruction by instruction: stages, microbatches, peers and slots exist, and are there where they are needed. What comes
/// after may index by them.
constexpr finding check_instructions(program_view const& program) {
  plan_view const& plan = program.plan;
  for (int r = 0; r < plan.size.ranks; ++r) {
    slot_counts const counts = program.slots[r];
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& one = program.instructions[i];
      action a = one.what;
      if (a.what == kind::reduce_gradients) a.micro_batch = 0;  // it is about all of them
      finding f = program_finding(law::ids_in_range, r, i - program.begin[r], a);
      if (static_cast<int>(a.what) >= program_kinds) {
        f.words = " is no instruction; kinds: ", f.limit = program_kinds;
        return f;
      }
      if (a.what == kind::optimizer_step) continue;
      int const stage = static_cast<int>(a.stage);
      if (stage >= plan.stages || static_cast<int>(a.micro_batch) >= plan.size.micro_batches || plan.rank_of[stage] != r)
        return misplaced(plan, f);
      if (a.what == kind::reduce_gradients) continue;
      if (is_compute(a.what)) {
        int const from = input_stage(plan, a);
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
        else if (a.what != kind::backward_weight && ((!local && one.local != no_slot) || (!remote && one.source != no_slot)))
          f.words = " names a slot for an input that does not come from there; stages: ", f.limit = plan.stages;
        else
          continue;
        return f;
      }
      int const peer_stage = other_end(plan, a);
      if (peer_stage < 0)
        f.words = " has nobody at its other end; stages: ", f.limit = plan.stages;
      else if (plan.rank_of[peer_stage] == r)
        f.words = " is a message of a rank to itself: the stage at its other end is on this rank too, rank ", f.other_rank = r;
      else if (one.peer != plan.rank_of[peer_stage])
        f.words = " names another peer than the rank of the stage at its other end, rank ",
        f.other_rank = plan.rank_of[peer_stage];
      else if (is_receive(a.what) ? one.source >= counts.receive : one.source >= counts.send)
        f.words = is_receive(a.what) ? " names a receive slot that this rank does not have; receive slots: "
                                     : " names a send slot that this rank does not have; send slots: ",
        f.limit = is_receive(a.what) ? counts.receive : counts.send;
      else if (is_send(a.what) && one.slot >= counts.activation)
        f.words = " names an activation slot that this rank does not have; activation slots: ", f.limit = counts.activation;
      else
        continue;
      return f;
    }
  }
  return {};
}

/// Each rank computes what its plan says, in that order, then sums each stage's gradients once and steps once.
constexpr finding check_computations(program_view const& program) {
  plan_view const& plan = program.plan;
  buffer<int> left(plan.stages);  // gradients still to come; -1: summed
  for (int s = 0; s < plan.stages; ++s) left.data[s] = plan.size.micro_batches;
  for (int r = 0; r < plan.size.ranks; ++r) {
    int next = plan.begin[r];
    bool stepped = false;
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      action const a = program.instructions[i].what;
      int const at = i - program.begin[r];
      if (a.fused != 0 && !is_compute(a.what))
        return program_finding(law::fused_pair, r, at, a, " is marked as half of a fused pair, but only computations are paired");
      if (is_compute(a.what)) {
        if (next == plan.begin[r + 1])
          return program_finding(law::no_duplicate, r, at, a, " comes after everything that the plan has for this rank");
        action const planned = plan.actions[next];
        if (!(a == planned) || a.fused != planned.fused)
          return program_finding(law::complete, r, at, planned, "the plan has it here, the program something else");
        ++next;
        if (a.fused != 0 && i + 1 < program.begin[r + 1] && !is_compute(program.instructions[i + 1].what.what)) {
          finding f =
              program_finding(law::fused_pair, r, at, a, " is the first half of a fused pair, but before the second comes ",
                              program.instructions[i + 1].what);
          f.links = 1;
          return f;
        }
        if (a.what == kind::backward || a.what == kind::backward_weight) --left.data[static_cast<int>(a.stage)];
      } else if (a.what == kind::reduce_gradients || a.what == kind::optimizer_step) {
        if (plan.forward_only) return program_finding(law::no_duplicate, r, at, a, " has no place in a forward-only program");
        bool const again = a.what == kind::optimizer_step ? stepped : left.data[static_cast<int>(a.stage)] < 0;
        if (again) return program_finding(law::no_duplicate, r, at, a, " comes a second time");
        // What it needs may come too late, or never.
        auto const early = [&](action needed, char const* why) {
          for (int j = i + 1; j < program.begin[r + 1]; ++j) {
            if (program.instructions[j].what == needed) return program_finding(law::order, r, at, a, "", needed);
          }
          return program_finding(law::complete, r, -1, needed, why);
        };
        if (a.what == kind::reduce_gradients) {
          int& gradients = left.data[static_cast<int>(a.stage)];
          for (int j = next; j < plan.begin[r + 1] && gradients > 0; ++j) {
            action const later = plan.actions[j];
            bool const completes = later.what == kind::backward || later.what == kind::backward_weight;
            if (completes && later.stage == a.stage) return early(later, "the plan has it, the program does not");
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
      return program_finding(law::complete, r, -1, plan.actions[next], "the plan has it, the program does not");
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

/// Channel by channel: the k-th send and the k-th posted receive of a directed edge are the same message.
constexpr finding check_channels(program_view const& program) {
  int const ranks = program.plan.size.ranks;
  // Each edge's receives in their order, as chains of instructions, counted from 1.
  buffer<int> first_memory(ranks * ranks, zeroed), next_memory(program.total());
  int* const first = first_memory.data;
  int* const next = next_memory.data;
  for (int r = ranks - 1; r >= 0; --r) {
    for (int i = program.begin[r + 1] - 1; i >= program.begin[r]; --i) {
      instruction const& one = program.instructions[i];
      if (!is_receive(one.what.what)) continue;
      int& edge = first[one.peer * ranks + r];
      next[i] = edge;
      edge = i + 1;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& send = program.instructions[i];
      if (!is_send(send.what.what)) continue;
      int& edge = first[r * ranks + send.peer];
      action const wanted = receive_of(send.what);
      if (edge == 0)
        return program_finding(law::matched, r, i - program.begin[r], send.what, " is never received: nobody posts ", wanted);
      int const posted = edge - 1;
      if (!(program.instructions[posted].what == wanted)) {
        return program_finding(law::matched, send.peer, posted - program.begin[send.peer], program.instructions[posted].what,
                               " is posted where this edge delivers ", wanted);
      }
      edge = next[posted];
    }
  }
  for (int edge = 0; edge < ranks * ranks; ++edge) {
    if (first[edge] == 0) continue;
    int const posted = first[edge] - 1;
    int const r = edge % ranks;
    action const receive = program.instructions[posted].what;
    return program_finding(law::matched, r, posted - program.begin[r], receive, " is never sent: there is no ", send_of(receive));
  }
  return {};
}

// What an activation slot still holds of its stage and microbatch.
inline constexpr std::uint8_t holds_graph = 1;      // until B or W
inline constexpr std::uint8_t holds_outputs = 2;    // until they are sent, or taken by the next stage on this rank
inline constexpr std::uint8_t holds_gradients = 4;  // of the inputs: until they are sent, or taken by the previous stage here

/// What each slot holds, instruction by instruction: nothing is written over that is still needed, nothing is read that is
/// not there, nothing is left at the end.
constexpr finding check_slots(program_view const& program) {
  plan_view const& plan = program.plan;
  int const micro_batches = plan.size.micro_batches;
  int const cells = plan.stages * micro_batches;
  buffer<std::uint16_t> arrived_memory(2 * cells, zeroed);  // receive slot of each input and gradient, counted from 1
  std::uint16_t* const arrived = arrived_memory.data;
  for (int r = 0; r < plan.size.ranks; ++r) {
    slot_counts const counts = program.slots[r];
    buffer<action> activation(counts.activation), receive(counts.receive), send(counts.send);
    buffer<std::uint8_t> holds_memory(counts.activation, zeroed), receive_live_memory(counts.receive, zeroed),
        send_live_memory(counts.send, zeroed);
    std::uint8_t* const holds = holds_memory.data;
    std::uint8_t* const receive_live = receive_live_memory.data;
    std::uint8_t* const send_live = send_live_memory.data;
    auto const has = [&](int slot, std::uint8_t what, int stage, action a) {
      return (holds[slot] & what) != 0 && static_cast<int>(activation.data[slot].stage) == stage &&
             activation.data[slot].micro_batch == a.micro_batch;
    };
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& one = program.instructions[i];
      int const at = i - program.begin[r];
      action const a = one.what;
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      if (is_receive(a.what)) {
        if (receive_live[one.source] != 0)
          return program_finding(law::slots, r, at, a, " is received over what is still needed of ", receive.data[one.source]);
        receive.data[one.source] = a;
        receive_live[one.source] = 1;
        arrived[a.what == kind::receive_forward ? cell : cells + cell] = static_cast<std::uint16_t>(one.source + 1);
      } else if (is_send(a.what)) {
        bool const forward = a.what == kind::send_forward;
        std::uint8_t const what = forward ? holds_outputs : holds_gradients;
        if (!has(one.slot, what, stage, a))
          return program_finding(law::slots, r, at, a,
                                 forward ? " sends from a slot that does not hold the outputs of "
                                         : " sends from a slot that does not hold the input gradients of ",
                                 make_action(forward ? kind::forward : kind::backward, stage, static_cast<int>(a.micro_batch)));
        if (send_live[one.source] != 0)
          return program_finding(law::slots, r, at, a, " takes the send slot of ", send.data[one.source]);
        holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] & ~what);
        send.data[one.source] = a;
        send_live[one.source] = 1;
      } else if (is_wait(a.what)) {
        if (send_live[one.source] == 0 || !(send.data[one.source] == send_of_wait(a)))
          return program_finding(law::slots, r, at, a, " waits for a send slot that does not hold ", send_of_wait(a));
        send_live[one.source] = 0;
      } else if (is_compute(a.what)) {
        bool const forward = a.what == kind::forward;
        int const from = input_stage(plan, a);
        if (!forward && !has(one.slot, holds_graph, stage, a))
          return program_finding(law::slots, r, at, a, " needs a slot that no longer holds ",
                                 make_action(kind::forward, stage, static_cast<int>(a.micro_batch)));
        if (from >= 0 && plan.rank_of[from] == r) {
          std::uint8_t const what = forward ? holds_outputs : holds_gradients;
          if (!has(one.local, what, from, a))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold the results of ",
                                   make_action(forward ? kind::forward : kind::backward, from, static_cast<int>(a.micro_batch)));
          holds[one.local] = static_cast<std::uint8_t>(holds[one.local] & ~what);
        } else if (from >= 0) {
          action const wanted =
              make_action(forward ? kind::receive_forward : kind::receive_backward, stage, static_cast<int>(a.micro_batch));
          if (receive_live[one.source] == 0 || !(receive.data[one.source] == wanted))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold ", wanted);
        }
        if (forward) {
          if (holds[one.slot] != 0)
            return program_finding(law::slots, r, at, a, " writes over what is still needed of ", activation.data[one.slot]);
          activation.data[one.slot] = a;
          // The last stage's outputs go to the loss or to the caller at once.
          holds[one.slot] =
              static_cast<std::uint8_t>((plan.forward_only ? 0 : holds_graph) | (stage + 1 < plan.stages ? holds_outputs : 0));
        } else if (a.what != kind::backward_weight && stage > 0) {
          holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] | holds_gradients);
        }
        if (plan.forward_only || a.what == kind::backward || a.what == kind::backward_weight) {
          holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] & ~holds_graph);
          // What the graph was made from goes with it.
          if (int const slot = arrived[cell]; slot != 0) receive_live[slot - 1] = 0;
          if (int const slot = arrived[cells + cell]; slot != 0) receive_live[slot - 1] = 0;
        }
      }
    }
    // Everything has been let go.
    for (int s = 0; s < counts.activation; ++s) {
      if (holds[s] == 0) continue;
      action const kept = activation.data[s];
      return program_finding(law::slots, r, -1, kept,
                             (holds[s] & holds_outputs) != 0
                                 ? " leaves outputs behind that nobody sends or takes: there is no send for "
                                 : " leaves input gradients behind that nobody sends or takes: there is no send for ",
                             kept);
    }
    for (int s = 0; s < counts.receive; ++s) {
      if (receive_live[s] != 0)
        return program_finding(law::slots, r, -1, receive.data[s], " is never used: no action reads ", receive.data[s]);
    }
    for (int s = 0; s < counts.send; ++s) {
      if (send_live[s] == 0) continue;
      action const sent = send.data[s];
      return program_finding(law::slots, r, -1, sent, " is never waited for: its tensors are kept for ever; there is no ",
                             make_action(sent.what == kind::send_forward ? kind::wait_send_forward : kind::wait_send_backward,
                                         static_cast<int>(sent.stage), static_cast<int>(sent.micro_batch)));
    }
  }
  return {};
}

/// What a blocked instruction needs of another rank: a compute its send, a wait its receive.
constexpr action needed_of_peer(plan_view const& plan, action a) {
  if (is_wait(a.what)) return receive_of(send_of_wait(a));
  return make_action(a.what == kind::forward ? kind::send_forward : kind::send_backward, input_stage(plan, a),
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
        action const a = program.instructions[next[r]].what;
        int const cell = static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch);
        if (a.what == kind::send_forward) sent[cell] = 1;
        if (a.what == kind::send_backward) sent[cells + cell] = 1;
        if (a.what == kind::receive_forward) posted[cell - micro_batches] = 1;
        if (a.what == kind::receive_backward) posted[cells + cell + micro_batches] = 1;
        if (a.what == kind::wait_send_forward && posted[cell] == 0) break;
        if (a.what == kind::wait_send_backward && posted[cells + cell] == 0) break;
        if (int const from = input_stage(plan, a); from >= 0 && plan.rank_of[from] != r) {
          int const message = a.what == kind::forward ? cell - micro_batches : cells + cell + micro_batches;
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
  auto const needed = [&](int r) { return needed_of_peer(plan, program.instructions[next[r]].what); };
  auto const waits_for = [&](int r) { return static_cast<int>(plan.rank_of[static_cast<int>(needed(r).stage)]); };
  int walker = stuck;
  for (int hop = 0; hop < ranks; ++hop) walker = waits_for(walker);
  int lowest = walker, links = 0, at = walker;
  do {
    at = waits_for(at);
    lowest = at < lowest ? at : lowest;
    ++links;
  } while (at != walker);
  finding f = program_finding(law::deadlock, lowest, next[lowest] - program.begin[lowest],
                              program.instructions[next[lowest]].what, "", needed(lowest));
  f.links = links;
  f.other_rank = waits_for(lowest);
  f.behind = program.instructions[next[f.other_rank]].what;
  f.then = needed(f.other_rank);
  int previous = lowest;
  for (int hop = 0; hop + 1 < links; ++hop) previous = waits_for(previous);
  f.last_behind = needed(previous);
  return f;
}

}  // namespace detail

/// The first broken law of a program, its plan's first, or `law::none`.
constexpr finding check(program_view const& program) {
  if (finding const f = check(program.plan)) return f;
  if (finding const f = detail::check_instructions(program)) return f;
  if (finding const f = detail::check_computations(program)) return f;
  if (finding const f = detail::check_channels(program)) return f;
  if (finding const f = detail::check_slots(program)) return f;
  return detail::check_program_progress(program);
}

}  // namespace chevron
