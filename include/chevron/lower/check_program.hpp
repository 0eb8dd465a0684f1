#pragma once

#include <cstdint>

#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// The laws on a program: sends and receives match one to one in order, slots are never written while their content is
/// needed, and with rendezvous sends on one in-order channel for each directed edge no rank waits for ever.

namespace chevron {

namespace detail {

constexpr action receive_of(action send) {
  return send.what == kind::send_forward
             ? make_action(kind::receive_forward, static_cast<int>(send.stage) + 1, static_cast<int>(send.micro_batch))
             : make_action(kind::receive_backward, static_cast<int>(send.stage) - 1, static_cast<int>(send.micro_batch));
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

/// Channel by channel: the k-th send and the k-th posted receive of a directed edge are the same message.
constexpr finding check_channels(program_view const& program) {
  int const ranks = program.plan.size.ranks;
  // For each sender, walk its list once and each peer's list alongside.
  buffer<int> cursor_memory(ranks);
  int* const cursor = cursor_memory.data;
  for (int sender = 0; sender < ranks; ++sender) {
    for (int r = 0; r < ranks; ++r) cursor[r] = program.begin[r];
    for (int i = program.begin[sender]; i < program.begin[sender + 1]; ++i) {
      instruction const& send = program.instructions[i];
      if (!is_send(send.what.what)) continue;
      int const peer = send.peer;
      int& at = cursor[peer];
      while (at < program.begin[peer + 1] &&
             !(is_receive(program.instructions[at].what.what) && program.instructions[at].peer == sender))
        ++at;
      if (at == program.begin[peer + 1]) {
        return program_finding(law::matched, sender, i - program.begin[sender], send.what, " is never received: nobody posts ",
                               receive_of(send.what));
      }
      if (!(program.instructions[at].what == receive_of(send.what))) {
        return program_finding(law::matched, peer, at - program.begin[peer], program.instructions[at].what,
                               " is posted where this edge delivers ", receive_of(send.what));
      }
      ++at;
    }
    for (int peer = 0; peer < ranks; ++peer) {
      for (int at = cursor[peer]; at < program.begin[peer + 1]; ++at) {
        instruction const& receive = program.instructions[at];
        if (is_receive(receive.what.what) && receive.peer == sender) {
          return program_finding(law::matched, peer, at - program.begin[peer], receive.what,
                                 " is never sent: the next message of this edge is none, after ", receive.what);
        }
      }
    }
  }
  return {};
}

/// What each slot holds, action by action: nothing is written over that is still needed, nothing read that is not there.
constexpr finding check_slots(program_view const& program) {
  plan_view const& plan = program.plan;
  for (int r = 0; r < plan.size.ranks; ++r) {
    slot_counts const counts = program.slots[r];
    buffer<action> activation(counts.activation, zeroed), receive(counts.receive, zeroed), send(counts.send, zeroed);
    buffer<std::uint8_t> activation_live(counts.activation, zeroed), receive_live(counts.receive, zeroed),
        send_live(counts.send, zeroed);
    for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
      instruction const& one = program.instructions[i];
      int const at = i - program.begin[r];
      action const a = one.what;
      if (is_receive(a.what)) {
        if (receive_live.data[one.source] != 0)
          return program_finding(law::slots, r, at, a, " is received over what is still needed of ", receive.data[one.source]);
        receive.data[one.source] = a;
        receive_live.data[one.source] = 1;
      } else if (is_send(a.what)) {
        if (send_live.data[one.source] != 0)
          return program_finding(law::slots, r, at, a, " takes the send slot of ", send.data[one.source]);
        send.data[one.source] = a;
        send_live.data[one.source] = 1;
      } else if (is_wait(a.what)) {
        send_live.data[one.source] = 0;
      } else if (is_compute(a.what)) {
        kind const source_kind = a.what == kind::forward ? kind::receive_forward : kind::receive_backward;
        if (one.source != no_slot) {
          action const wanted = make_action(source_kind, static_cast<int>(a.stage), static_cast<int>(a.micro_batch));
          if (receive_live.data[one.source] == 0 || !(receive.data[one.source] == wanted))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold ", wanted);
        }
        if (one.local != no_slot) {
          int const neighbour = static_cast<int>(a.stage) + (a.what == kind::forward ? -1 : 1);
          action const wanted = make_action(kind::forward, neighbour, static_cast<int>(a.micro_batch));
          if (!(activation.data[one.local] == wanted))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold the results of ", wanted);
        }
        if (a.what == kind::forward) {
          if (activation_live.data[one.slot] != 0)
            return program_finding(law::slots, r, at, a, " writes over what is still needed of ", activation.data[one.slot]);
          activation.data[one.slot] = a;
          activation_live.data[one.slot] = plan.forward_only ? 0 : 1;
        } else {
          action const wanted = make_action(kind::forward, static_cast<int>(a.stage), static_cast<int>(a.micro_batch));
          if (!(activation.data[one.slot] == wanted) || activation_live.data[one.slot] == 0)
            return program_finding(law::slots, r, at, a, " needs a slot that no longer holds ", wanted);
        }
        bool const lets_go = plan.forward_only || a.what == kind::backward || a.what == kind::backward_weight;
        if (lets_go) {
          activation_live.data[one.slot] = 0;
          for (int s = 0; s < counts.receive; ++s) {
            if (receive_live.data[s] != 0 && receive.data[s].stage == a.stage && receive.data[s].micro_batch == a.micro_batch)
              receive_live.data[s] = 0;
          }
        }
      }
    }
  }
  return {};
}

/// Runs the program with rendezvous sends: a computation needs its receive's send to be posted, a wait needs its send's
/// receive to be posted. Everything else never blocks.
constexpr finding check_program_progress(program_view const& program) {
  plan_view const& plan = program.plan;
  int const ranks = plan.size.ranks;
  int const cells = plan.stages * plan.size.micro_batches;
  buffer<std::uint8_t> sent(2 * cells, zeroed), posted(2 * cells, zeroed);  // by producer message
  buffer<int> next(ranks);
  for (int r = 0; r < ranks; ++r) next.data[r] = program.begin[r];
  bool moved = true;
  while (moved) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      for (; next.data[r] < program.begin[r + 1]; ++next.data[r]) {
        instruction const& one = program.instructions[next.data[r]];
        action const a = one.what;
        int const cell = static_cast<int>(a.stage) * plan.size.micro_batches + static_cast<int>(a.micro_batch);
        if (a.what == kind::send_forward) sent.data[cell] = 1;
        if (a.what == kind::send_backward) sent.data[cells + cell] = 1;
        if (a.what == kind::receive_forward) posted.data[cell - plan.size.micro_batches] = 1;
        if (a.what == kind::receive_backward) posted.data[cells + cell + plan.size.micro_batches] = 1;
        if (a.what == kind::wait_send_forward && posted.data[cell] == 0) break;
        if (a.what == kind::wait_send_backward && posted.data[cells + cell] == 0) break;
        if (is_compute(a.what) && one.source != no_slot) {
          int const message = a.what == kind::forward ? cell - plan.size.micro_batches : cells + cell + plan.size.micro_batches;
          if (sent.data[message] == 0 || posted.data[message] == 0) break;
        }
        moved = true;
      }
    }
  }
  for (int r = 0; r < ranks; ++r) {
    if (next.data[r] == program.begin[r + 1]) continue;
    instruction const& one = program.instructions[next.data[r]];
    finding f = program_finding(law::deadlock, r, next.data[r] - program.begin[r], one.what, "", one.what);
    int const peer = is_compute(one.what.what)
                         ? plan.rank_of[static_cast<int>(one.what.stage) + (one.what.what == kind::forward ? -1 : 1)]
                         : one.peer;
    f.other = is_compute(one.what.what)
                  ? make_action(one.what.what == kind::forward ? kind::send_forward : kind::send_backward,
                                static_cast<int>(one.what.stage) + (one.what.what == kind::forward ? -1 : 1),
                                static_cast<int>(one.what.micro_batch))
                  : receive_of(make_action(one.what.what == kind::wait_send_forward ? kind::send_forward : kind::send_backward,
                                           static_cast<int>(one.what.stage), static_cast<int>(one.what.micro_batch)));
    f.other_rank = peer;
    f.behind = next.data[peer] < program.begin[peer + 1] ? program.instructions[next.data[peer]].what : f.what;
    f.links = 1;
    return f;
  }
  return {};
}

}  // namespace detail

/// The first broken law of a program, or `law::none`.
constexpr finding check(program_view const& program) {
  if (finding const f = detail::check_channels(program)) return f;
  if (finding const f = detail::check_slots(program)) return f;
  return detail::check_program_progress(program);
}

}  // namespace chevron
