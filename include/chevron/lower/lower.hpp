#pragma once

#include <concepts>
#include <cstdint>

#include <chevron/lower/program.hpp>
#include <chevron/lower/receive_posts.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/proved_plan.hpp>

/// \file
/// Turns a proved plan into a program: inserts sends, receives, waits, sums of gradients and the unsharding of parameters, and
/// assigns slots to tensors.
///
/// - A send follows the computation that made its tensors. Sends of one directed edge thus have the order of their producers.
/// - Receives of an edge are posted in the order of the sends they match, each receive one compute action ahead of the latest
///   moment that this order allows: early enough that the transfer overlaps with a computation. Posting never blocks.
/// - The wait for a send is placed where a message from the receiving rank proves that the receive was posted, so the wait
///   delays no rank. The remaining waits are at the end of the step.
/// - The halves of a fused pair are neighbours: receives for either half come before the pair, sends of either half after it.
/// - The B or W of a microbatch on a stage frees its receive slots and its activation slot there. If the previous stage is on
///   the same rank and takes its gradient from the activation slot later, that stage's B or I frees the slot. In forward-only
///   plans the F frees both or, if the next stage is on the same rank, the next stage's F; outputs of the last stage stay.

namespace chevron {

namespace detail {

/// Hands out numbers of free slots; `made` is the largest number of slots in use at once.
struct slot_pool {
  std::uint16_t* free;
  int free_count = 0;
  int made = 0;

  constexpr std::uint16_t take() { return free_count > 0 ? free[--free_count] : static_cast<std::uint16_t>(made++); }
  constexpr void give(std::uint16_t slot) { free[free_count++] = slot; }
};

/// The instruction that waits for the end of a send. Messages below `cells` are activations, the rest gradients.
constexpr instruction wait_for(int message, int cells, int units, int receiver, std::uint16_t slot) {
  bool const forward = message < cells;
  int const cell = forward ? message : message - cells;
  return {make_action(forward ? kind::wait_send_forward : kind::wait_send_backward, cell / units, cell % units),
          static_cast<std::int16_t>(receiver), no_slot, slot, no_slot};
}

}  // namespace detail

/// How many instructions the program of a plan has.
constexpr int instructions_needed(plan_view const& plan) {
  return plan.total() + 3 * messages(plan) + (plan.forward_only ? 0 : 2 * plan.stages + plan.size.ranks);
}

namespace detail {

/// Writes a lawful plan's program, rank by rank and action by action: before an action the receives that are posted there;
/// after it its sends, and the waits for earlier sends whose receives are proved posted by the message that the action
/// consumed. Then frees the slots that no later action uses.
class program_writer {
 public:
  constexpr program_writer(plan_view const& plan, owned_program& result)
      : plan_(plan),
        units_(plan.size.units()),
        cells_(plan.stages * units_),
        last_stage_(plan.stages - 1),
        rank_of_(plan.rank_of),
        out_(result.instructions.data),
        posts_(plan, cells_),
        activation_(cells_),
        receive_slot_(2 * cells_),
        done_once_(cells_),
        free_activation_(most_on_a_rank(plan) * plan.size.units()),
        free_send_(2 * free_activation_.count),
        free_receive_(2 * plan.stages, zeroed),
        free_receive_next_(2 * free_activation_.count),
        sent_(2 * free_activation_.count),
        pending_first_(plan.size.ranks),
        pending_last_(plan.size.ranks),
        known_(plan.size.ranks),
        left_(plan.stages, units_),
        begun_(plan.stages, zeroed) {}

  /// Writes one rank's instructions, and sets `slots` to the rank's numbers of slots.
  /// \returns the number of instructions of this rank and all ranks before it
  constexpr int write_rank(int rank, slot_counts& slots) {
    activation_pool_ = {free_activation_.data};
    send_pool_ = {free_send_.data};
    receive_slots_ = 0;
    sends_ = 0;
    for (int p = 0; p < plan_.size.ranks; ++p) {
      pending_first_.data[p] = 0;
      pending_last_.data[p] = 0;
      known_.data[p] = -1;
    }
    plan_view const& plan = plan_;
    int const* const bucket = posts_.first.data;
    action const* const actions = plan.actions;
    std::int16_t const* const rank_of = plan.rank_of;
    int const* const forward_at = posts_.forward_at.data;
    int const* const gradient_at = posts_.gradient_at.data;
    std::uint16_t* const activation = activation_.data;
    std::uint16_t* const receive_slot = receive_slot_.data;
    int* const known = known_.data;
    instruction* const out = out_;
    int const units = units_;
    int const last_stage = last_stage_;
    int const first = plan.begin[rank];
    int const stop = plan.begin[rank + 1];
    bool const forward_only = plan.forward_only;
    outcome first_half;
    for (int i = first; i < stop; ++i) {
      if (bucket[i] != 0) post_receives(bucket[i]);
      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * units + static_cast<int>(a.micro_batch);
      if (!forward_only && !begun_.data[stage]) {
        begun_.data[stage] = true;
        out[filled_++] = {make_action(kind::unshard, stage, 0), no_peer, no_slot, no_slot, no_slot};
      }
      std::uint16_t source_slot = no_slot;
      std::uint16_t local_slot = no_slot;
      int peer_heard = -1;
      int heard = -1;
      bool const hands_back = makes_input_gradient(a.kind);
      if (a.kind == kind::forward) {
        activation[cell] = activation_pool_.take();
        done_once_.data[cell] = false;
        if (stage > 0) {
          int const before = cell - units;
          int const from = rank_of[stage - 1];
          if (from == rank) {
            local_slot = activation[before];
          } else {
            source_slot = receive_slot[before];
            peer_heard = from;
            heard = forward_at[before];
          }
        }
      } else if (hands_back && stage < last_stage) {
        int const behind = cell + units;
        int const from = rank_of[stage + 1];
        if (from == rank) {
          local_slot = activation[behind];
        } else {
          source_slot = receive_slot[cells_ + behind];
          peer_heard = from;
          heard = gradient_at[behind];
        }
      }
      out[filled_++] = {a, no_peer, is_own(a.kind) ? no_slot : activation[cell], source_slot, local_slot};
      // An action's sends, and the waits that its input allows, follow the action; for a fused pair, both halves.
      if (a.fused != 0) {
        first_half = {a, cell, peer_heard, heard};
      } else {
        bool const second = i > first && actions[i - 1].fused != 0;
        if (second) send_result(first_half.what, first_half.cell);
        send_result(a, cell);
        if (second && first_half.peer_heard >= 0 && first_half.heard > known[first_half.peer_heard])
          wait_for_sends(first_half.peer_heard, first_half.heard);
        if (peer_heard >= 0 && heard > known[peer_heard]) wait_for_sends(peer_heard, heard);
      }
      if (hands_back && stage < last_stage && rank_of[stage + 1] == rank) give_activation_slot(cell + units);
      if (forward_only || ends_cell(a.kind)) let_go(stage, cell, rank);
    }
    wait_for_rest();
    if (!forward_only) out_[filled_++] = {make_action(kind::optimizer_step, 0, 0), no_peer, no_slot, no_slot, no_slot};
    slots = {activation_pool_.made, receive_slots_, send_pool_.made};
    return filled_;
  }

 private:
  /// Of one action: the rank whose message the action consumed (-1: none), and the position in that rank's list of the
  /// message's producer.
  struct outcome {
    action what{};
    int cell = 0;
    int peer_heard = -1;
    int heard = -1;
  };
  /// A sent message and its send slot.
  struct sent_message {
    int message;
    int next;  // next message to this receiver that is not waited for yet, 1-based; 0: none
    std::uint16_t slot;
  };

  constexpr void post_receives(int next) {
    for (; next != 0; next = posts_.next.data[next - 1]) {
      int const message = next - 1;
      bool const goes_forward = message < cells_;
      int const producer_cell = goes_forward ? message : message - cells_;
      int const producer_stage = producer_cell / units_;
      int const stage = goes_forward ? producer_stage + 1 : producer_stage - 1;
      int& chain = free_receive_.data[2 * stage + (goes_forward ? 0 : 1)];
      int slot = receive_slots_;
      if (chain != 0) {
        slot = chain - 1;
        chain = free_receive_next_.data[slot];
      } else {
        ++receive_slots_;
      }
      receive_slot_.data[message] = static_cast<std::uint16_t>(slot);
      out_[filled_++] = {
          make_action(goes_forward ? kind::receive_forward : kind::receive_backward, stage, producer_cell % units_),
          rank_of_[producer_stage], no_slot, static_cast<std::uint16_t>(slot), no_slot};
    }
  }

  constexpr void send_result(action a, int cell) {
    int const receiver = posts_.of_stage.data[a.stage].of(a.kind);
    if (receiver < 0) return;
    bool const goes_forward = a.kind == kind::forward;
    std::uint16_t const slot = send_pool_.take();
    sent_.data[sends_++] = {goes_forward ? cell : cells_ + cell, 0, slot};
    out_[filled_++] = {make_action(goes_forward ? kind::send_forward : kind::send_backward, static_cast<int>(a.stage),
                                   static_cast<int>(a.micro_batch)),
                       static_cast<std::int16_t>(receiver), activation_.data[cell], slot, no_slot};
    int& last = pending_last_.data[receiver];
    (last != 0 ? sent_.data[last - 1].next : pending_first_.data[receiver]) = sends_;
    last = sends_;
  }

  /// Writes the waits for sends to `peer` whose receives `peer` posted before it ran the action at its position `heard`.
  constexpr void wait_for_sends(int peer, int heard) {
    known_.data[peer] = heard;
    int& first = pending_first_.data[peer];
    while (first != 0 && posts_.posted_at.data[sent_.data[first - 1].message] <= heard) {
      sent_message const over = sent_.data[first - 1];
      out_[filled_++] = wait_for(over.message, cells_, units_, peer, over.slot);
      send_pool_.give(over.slot);
      first = over.next;
      if (first == 0) pending_last_.data[peer] = 0;
    }
  }
  constexpr void wait_for_rest() {
    for (int p = 0; p < plan_.size.ranks; ++p) {
      for (int next = pending_first_.data[p]; next != 0; next = sent_.data[next - 1].next)
        out_[filled_++] = wait_for(sent_.data[next - 1].message, cells_, units_, p, sent_.data[next - 1].slot);
    }
  }

  /// Frees the slots of a stage and microbatch that is done on this rank; sums the gradients of a stage whose last microbatch
  /// is done.
  constexpr void let_go(int stage, int cell, int rank) {
    bool const forward_only = plan_.forward_only;
    bool const next_here = stage < last_stage_ && rank_of_[stage + 1] == rank;
    bool const previous_here = stage > 0 && rank_of_[stage - 1] == rank;
    if (stage > 0 && !previous_here) give_receive_slot(2 * stage, cell - units_);
    if (forward_only) {
      if (stage < last_stage_ && !next_here)
        activation_pool_.give(activation_.data[cell]);  // the last stage's outputs are kept for the caller
      if (previous_here) activation_pool_.give(activation_.data[cell - units_]);
      return;
    }
    if (stage < last_stage_ && !next_here) give_receive_slot(2 * stage + 1, cells_ + cell + units_);
    if (--left_.data[stage] == 0)
      out_[filled_++] = {make_action(kind::reduce_gradients, stage, 0), no_peer, no_slot, no_slot, no_slot};
    if (previous_here)
      give_activation_slot(cell);
    else
      activation_pool_.give(activation_.data[cell]);
  }
  constexpr void give_receive_slot(int chain, int message) {
    int const slot = receive_slot_.data[message];
    free_receive_next_.data[slot] = free_receive_.data[chain];
    free_receive_.data[chain] = slot + 1;
  }
  /// Called at the end of each of two uses of a cell's activation slot, its own and the previous stage's; the second call frees
  /// the slot.
  constexpr void give_activation_slot(int cell) {
    if (done_once_.data[cell]) activation_pool_.give(activation_.data[cell]);
    done_once_.data[cell] = true;
  }

  plan_view const& plan_;
  int units_, cells_, last_stage_;
  std::int16_t const* rank_of_;
  instruction* out_;
  int filled_ = 0;
  receive_posts posts_;
  buffer<std::uint16_t> activation_, receive_slot_;  // slots, by cell and by message
  buffer<bool> done_once_;                           // by cell: the first of two uses of its slot is over
  // Scratch memory for one rank, reused for every rank, so that it remains in the CPU's cache.
  buffer<std::uint16_t> free_activation_, free_send_;
  slot_pool activation_pool_{}, send_pool_{};
  // A receive slot is reused only for messages of the same stage and direction: a linked list of free slots for each.
  buffer<int> free_receive_, free_receive_next_;  // slots, 1-based; 0: none
  int receive_slots_ = 0;
  // A rank's sends, in order. A linked list per receiver of the sends not waited for yet; and the latest position that each
  // peer has reached for certain.
  buffer<sent_message> sent_;
  int sends_ = 0;
  buffer<int> pending_first_, pending_last_, known_;  // by peer; the first two: indices in `sent_`, 1-based; 0: none
  buffer<int> left_;                                  // by stage: number of microbatches that are not done
  buffer<bool> begun_;                                // by stage: its UNSHARD is written
};

/// The program of a lawful plan; for an unlawful plan the result means nothing.
constexpr owned_program lower_lawful(plan source) {
  owned_program result;
  result.source = static_cast<plan&&>(source);
  plan_view const plan = result.source.view();
  int const ranks = plan.size.ranks;
  result.instructions = buffer<instruction>(instructions_needed(plan));
  result.begin = buffer<int>(ranks + 1);
  result.begin.data[0] = 0;
  result.slots = buffer<slot_counts>(ranks);
  program_writer writer(plan, result);
  for (int r = 0; r < ranks; ++r) result.begin.data[r + 1] = writer.write_rank(r, result.slots.data[r]);
  return result;
}

}  // namespace detail

/// Lowers a proved plan to a program, which stores the plan: move the plan in where it is not needed any more. O(actions +
/// ranks²). Trainers, evaluators, `run_threads` and `run_processes` take the program.
constexpr proved_program lower(proved_plan source) {
  if (source.owned_.begin.count > 0) return proved_program(detail::lower_lawful(static_cast<plan&&>(source.owned_)));
  return proved_program(detail::lower_lawful(copy_of(source.constant_)));
}

/// Does not compile for a plan that is not proved: the plan may break a law, and then its program would not run.
template <std::same_as<plan> Plan>
constexpr proved_program lower(Plan const&) {
  static_assert(!std::same_as<Plan, plan>, "only a proved plan is lowered: lower(prove(plan))");
  return lower(prove(plan()));
}
constexpr proved_program lower(plan_view const&) = delete;  // only a proved plan is lowered: lower(prove(plan))

}  // namespace chevron
