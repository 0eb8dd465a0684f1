#pragma once

#include <concepts>
#include <cstdint>

#include <chevron/lower/program.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/proved_plan.hpp>

/// \file
/// From a proved plan to a program: where sends, receives and waits go, which slot each tensor lives in, when gradients are
/// summed.
///
/// - A send follows the computation that made its tensors. Sends of one directed edge thus have the order of their producers.
/// - Receives of an edge are posted in the order of the sends they match, each one compute action ahead of the latest moment
///   that this order allows: early enough that the transfer hides behind a computation. Posting never blocks.
/// - A send is waited for where something received from its receiver proves that the receive was posted; the wait then never
///   holds up anybody. What is left is waited for at the end of the step.
/// - A fused pair's halves stand next to each other: its receives come before both, its sends after both.
/// - A receive slot lives until its microbatch's B or W on that stage; an activation slot too, or until the neighbouring stage
///   on the same rank took the gradient from it.

namespace chevron {

namespace detail {

/// Which rank takes what a stage makes: its activations, and its gradients; -1 where no other rank does.
struct receivers {
  int of_activation;
  int of_gradient;

  constexpr int of(kind what) const {
    return what == kind::forward ? of_activation : hands_on(what) ? of_gradient : -1;
  }
};
constexpr receivers receivers_of(plan_view const& plan, int stage) {
  int const here = plan.rank_of[stage];
  int const after = stage + 1 < plan.stages ? plan.rank_of[stage + 1] : here;
  int const before = stage > 0 ? plan.rank_of[stage - 1] : here;
  return {after == here ? -1 : after, before == here ? -1 : before};
}

/// Slots handed out and taken back; the most in use at once is the number needed.
struct slot_pool {
  std::uint16_t* free;
  int free_count = 0;
  int made = 0;

  constexpr std::uint16_t take() { return free_count > 0 ? free[--free_count] : static_cast<std::uint16_t>(made++); }
  constexpr void give(std::uint16_t slot) { free[free_count++] = slot; }
};

/// The end of a send is waited for.
constexpr instruction wait_for(int message, int cells, int micro_batches, int receiver, std::uint16_t slot) {
  bool const forward = message < cells;
  int const cell = forward ? message : message - cells;
  return {make_action(forward ? kind::wait_send_forward : kind::wait_send_backward, cell / micro_batches, cell % micro_batches),
          static_cast<std::int16_t>(receiver), no_slot, slot, no_slot};
}

/// The most stages on one rank, times the microbatches.
constexpr int most_cells_of_a_rank(plan_view const& plan) {
  buffer<int> held(plan.size.ranks, zeroed);
  int most = 0;
  for (int s = 0; s < plan.stages; ++s) {
    int const now = ++held.data[plan.rank_of[s]];
    most = now > most ? now : most;
  }
  return most * plan.size.micro_batches;
}

}  // namespace detail

/// How many instructions the program of a plan has.
constexpr int instructions_needed(plan_view const& plan) {
  return plan.total() + 3 * messages(plan) + (plan.forward_only ? 0 : plan.stages + plan.size.ranks);
}

namespace detail {

/// The program of a lawful plan; for any other the result means nothing.
constexpr program lower_lawful(plan source) {
  program result;
  result.source = static_cast<plan&&>(source);
  plan_view const plan = result.source.view();
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.micro_batches;
  int const cells = plan.stages * micro_batches;
  int const last_stage = plan.stages - 1;
  action const* const actions = plan.actions;

  buffer<detail::receivers> receivers_memory(plan.stages);
  detail::receivers* const receivers = receivers_memory.data;
  for (int s = 0; s < plan.stages; ++s) receivers[s] = detail::receivers_of(plan, s);

  // Where on its rank each (stage, microbatch) runs forward and passes its gradient on.
  buffer<int> forward_at_memory(cells), gradient_at_memory(cells);
  int* const forward_at = forward_at_memory.data;
  int* const gradient_at = gradient_at_memory.data;
  for (int r = 0; r < ranks; ++r) {
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      action const a = actions[i];
      int const cell = static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch);
      int const position = i - plan.begin[r];
      if (a.kind == kind::forward) forward_at[cell] = position;
      if (makes_input_gradient(a.kind)) gradient_at[cell] = position;
    }
  }

  // When each message's receive is posted. Messages are numbered by their producer: forwards [0, cells), gradients after.
  // Going through a sender's list from its end, the latest moment for a receive is the earliest use of it or of any later
  // message on the edge.
  constexpr int ahead = 1;
  buffer<int> posted_at_memory(2 * cells), bucket_next_memory(2 * cells), bucket_memory(plan.total(), zeroed),
      earliest_use_memory(ranks);
  int* const posted_at = posted_at_memory.data;
  int* const bucket_next = bucket_next_memory.data;  // further receives posted before the same action, 1-based; 0: none
  int* const bucket = bucket_memory.data;
  int* const earliest_use = earliest_use_memory.data;
  for (int sender = 0; sender < ranks; ++sender) {
    for (int r = 0; r < ranks; ++r) earliest_use[r] = plan.begin[r + 1] - plan.begin[r];
    for (int i = plan.begin[sender + 1] - 1; i >= plan.begin[sender]; --i) {
      int const receiver = receivers[actions[i].stage].of(actions[i].kind);
      if (receiver < 0) continue;
      int const cell = static_cast<int>(actions[i].stage) * micro_batches + static_cast<int>(actions[i].micro_batch);
      bool const goes_forward = actions[i].kind == kind::forward;
      int const message = goes_forward ? cell : cells + cell;
      int use = goes_forward ? forward_at[cell + micro_batches] : gradient_at[cell - micro_batches];
      int const* const begin_there = plan.begin + receiver;
      if (use > 0 && actions[*begin_there + use - 1].fused != 0) --use;  // a pair starts with its first half
      if (use < earliest_use[receiver]) earliest_use[receiver] = use;
      int post = earliest_use[receiver] > ahead ? earliest_use[receiver] - ahead : 0;
      if (post > 0 && actions[*begin_there + post - 1].fused != 0) --post;  // nothing comes between the halves
      posted_at[message] = post;
      bucket_next[message] = bucket[plan.begin[receiver] + post];
      bucket[plan.begin[receiver] + post] = message + 1;
    }
  }

  result.instructions = buffer<instruction>(instructions_needed(plan));
  result.begin = buffer<int>(ranks + 1);
  result.begin.data[0] = 0;
  result.slots = buffer<slot_counts>(ranks);
  instruction* const out = result.instructions.data;
  int filled = 0;

  buffer<std::uint16_t> activation_memory(cells), receive_memory(2 * cells);
  std::uint16_t* const activation = activation_memory.data;
  std::uint16_t* const receive_slot = receive_memory.data;  // by producer message
  // Where the previous stage is on this rank too, it takes its gradient from the activation slot. Whichever is done with the slot
  // last gives it back: that I or B, or the slot's own B or W.
  buffer<bool> done_once_memory(cells);
  bool* const done_once = done_once_memory.data;
  // Of one rank at a time: what is touched beside the program stays small, and so warm from one plan to the next.
  int const most_here = detail::most_cells_of_a_rank(plan);
  buffer<std::uint16_t> free_activation(most_here), free_send(2 * most_here);
  // Receive slots are shared only among microbatches of one stage and direction: a chain of free slots for each.
  buffer<int> free_receive_memory(2 * plan.stages, zeroed), free_receive_next_memory(2 * most_here);
  int* const free_receive = free_receive_memory.data;  // 1-based; 0: none
  int* const free_receive_next = free_receive_next_memory.data;
  // What a rank sends, in order: the message and its slot. Of those not waited for yet, a chain per receiver; and how far each
  // peer is known to have come.
  struct sent_message {
    int message;
    int next;  // 1-based; 0: none
    std::uint16_t slot;
  };
  buffer<sent_message> sent_memory(2 * most_here);
  sent_message* const sent = sent_memory.data;
  buffer<int> pending_first_memory(ranks), pending_last_memory(ranks), known_memory(ranks);
  int* const pending_first = pending_first_memory.data;  // 1-based; 0: none
  int* const pending_last = pending_last_memory.data;
  int* const known = known_memory.data;
  buffer<int> left_memory(plan.stages);
  int* const left = left_memory.data;
  for (int s = 0; s < plan.stages; ++s) left[s] = micro_batches;

  for (int r = 0; r < ranks; ++r) {
    detail::slot_pool activation_pool{free_activation.data};
    detail::slot_pool send_pool{free_send.data};
    int receive_slots = 0;
    int sends = 0;
    // Of one action: whose message it consumed (-1: none's), and how far that peer had come when it was made.
    struct outcome {
      action what{};
      int cell = 0;
      int peer_heard = -1;
      int heard = -1;
    } first_half;
    for (int p = 0; p < ranks; ++p) {
      pending_first[p] = 0;
      pending_last[p] = 0;
      known[p] = -1;
    }
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      for (int next = bucket[i]; next != 0; next = bucket_next[next - 1]) {
        int const message = next - 1;
        bool const goes_forward = message < cells;
        int const producer_cell = goes_forward ? message : message - cells;
        int const producer_stage = producer_cell / micro_batches;
        int const stage = goes_forward ? producer_stage + 1 : producer_stage - 1;
        int& chain = free_receive[2 * stage + (goes_forward ? 0 : 1)];
        int slot = receive_slots;
        if (chain != 0) {
          slot = chain - 1;
          chain = free_receive_next[slot];
        } else {
          ++receive_slots;
        }
        receive_slot[message] = static_cast<std::uint16_t>(slot);
        out[filled++] = {
            make_action(goes_forward ? kind::receive_forward : kind::receive_backward, stage, producer_cell % micro_batches),
            plan.rank_of[producer_stage], no_slot, static_cast<std::uint16_t>(slot), no_slot};
      }

      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      instruction& compute = out[filled++];
      std::uint16_t source_slot = no_slot;
      std::uint16_t local_slot = no_slot;
      int peer_heard = -1;
      int heard = -1;
      if (a.kind == kind::forward) {
        activation[cell] = activation_pool.take();
        done_once[cell] = false;
        if (stage > 0) {
          int const from = plan.rank_of[stage - 1];
          if (from == r) {
            local_slot = activation[cell - micro_batches];
          } else {
            source_slot = receive_slot[cell - micro_batches];
            peer_heard = from;
            heard = forward_at[cell - micro_batches];
          }
        }
      } else if (makes_input_gradient(a.kind) && stage < last_stage) {
        int const from = plan.rank_of[stage + 1];
        if (from == r) {
          local_slot = activation[cell + micro_batches];
        } else {
          source_slot = receive_slot[cells + cell + micro_batches];
          peer_heard = from;
          heard = gradient_at[cell + micro_batches];
        }
      }
      compute = {a, no_peer, is_own(a.kind) ? no_slot : activation[cell], source_slot, local_slot};

      // What an action hands on and learns comes after it; of a fused pair, after both halves.
      outcome const own{a, cell, peer_heard, heard};
      if (a.fused != 0) {
        first_half = own;
      } else {
        bool const second = i > plan.begin[r] && actions[i - 1].fused != 0;
        for (int half = second ? 0 : 1; half < 2; ++half) {
          outcome const& done = half == 0 ? first_half : own;
          int const receiver = receivers[done.what.stage].of(done.what.kind);
          if (receiver < 0) continue;
          bool const goes_forward = done.what.kind == kind::forward;
          int const message = goes_forward ? done.cell : cells + done.cell;
          sent_message& now = sent[sends++];
          now = {message, 0, send_pool.take()};
          out[filled++] = {make_action(goes_forward ? kind::send_forward : kind::send_backward, static_cast<int>(done.what.stage),
                                       static_cast<int>(done.what.micro_batch)),
                           static_cast<std::int16_t>(receiver), activation[done.cell], now.slot, no_slot};
          if (pending_last[receiver] != 0)
            sent[pending_last[receiver] - 1].next = sends;
          else
            pending_first[receiver] = sends;
          pending_last[receiver] = sends;
        }
        for (int half = second ? 0 : 1; half < 2; ++half) {
          outcome const& done = half == 0 ? first_half : own;
          if (done.peer_heard < 0 || done.heard <= known[done.peer_heard]) continue;
          known[done.peer_heard] = done.heard;
          int& first = pending_first[done.peer_heard];
          while (first != 0 && posted_at[sent[first - 1].message] <= done.heard) {
            sent_message const over = sent[first - 1];
            out[filled++] = detail::wait_for(over.message, cells, micro_batches, done.peer_heard, over.slot);
            send_pool.give(over.slot);
            first = over.next;
            if (first == 0) pending_last[done.peer_heard] = 0;
          }
        }
      }

      bool const lets_go = plan.forward_only || ends_cell(a.kind);
      if (lets_go) {
        if (stage > 0 && plan.rank_of[stage - 1] != r) {
          int const slot = receive_slot[cell - micro_batches];
          free_receive_next[slot] = free_receive[2 * stage];
          free_receive[2 * stage] = slot + 1;
        }
        if (!plan.forward_only && stage < last_stage && plan.rank_of[stage + 1] != r) {
          int const slot = receive_slot[cells + cell + micro_batches];
          free_receive_next[slot] = free_receive[2 * stage + 1];
          free_receive[2 * stage + 1] = slot + 1;
        }
        if (!plan.forward_only && --left[stage] == 0)
          out[filled++] = {make_action(kind::reduce_gradients, stage, 0), no_peer, no_slot, no_slot, no_slot};
      }
      bool const next_here = stage < last_stage && plan.rank_of[stage + 1] == r;
      bool const previous_here = stage > 0 && plan.rank_of[stage - 1] == r;
      if (plan.forward_only) {
        if (stage < last_stage && !next_here) activation_pool.give(activation[cell]);  // the last outputs stay for the caller
        if (previous_here) activation_pool.give(activation[cell - micro_batches]);
        continue;
      }
      if (next_here && makes_input_gradient(a.kind)) {
        if (done_once[cell + micro_batches]) activation_pool.give(activation[cell + micro_batches]);
        done_once[cell + micro_batches] = true;
      }
      if (lets_go) {
        if (!previous_here || done_once[cell]) activation_pool.give(activation[cell]);
        done_once[cell] = true;
      }
    }
    for (int p = 0; p < ranks; ++p) {
      for (int next = pending_first[p]; next != 0; next = sent[next - 1].next)
        out[filled++] = detail::wait_for(sent[next - 1].message, cells, micro_batches, p, sent[next - 1].slot);
    }
    if (!plan.forward_only) out[filled++] = {make_action(kind::optimizer_step, 0, 0), no_peer, no_slot, no_slot, no_slot};
    result.begin.data[r + 1] = filled;
    result.slots.data[r] = {activation_pool.made, receive_slots, send_pool.made};
  }
  return result;
}

}  // namespace detail

/// Lowers a proved plan, which the program keeps: move it in where it is not needed any more. O(actions + ranks²). The result is
/// what trainers, evaluators, `run_threads` and `run_processes` take.
constexpr proved_program lower(proved_plan source) {
  if (source.owned_.begin.count > 0) return proved_program(detail::lower_lawful(static_cast<plan&&>(source.owned_)));
  return proved_program(detail::lower_lawful(copy_of(source.constant_)));
}

/// A plan may break a law, and a program of such a plan would not run.
template <std::same_as<plan> Plan>
constexpr proved_program lower(Plan const&) {
  static_assert(!std::same_as<Plan, plan>, "only a proved plan is lowered: lower(prove(plan))");
  return lower(prove(plan()));
}
constexpr proved_program lower(plan_view const&) = delete;  // only a proved plan is lowered: lower(prove(plan))

}  // namespace chevron
