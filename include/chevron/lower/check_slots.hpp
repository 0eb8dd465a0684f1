#pragma once

#include <cstdint>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// The law of slots: no slot is read before it is filled, or written while its content is needed, and every tensor is freed.
/// lower.hpp decides which action frees a slot.

namespace chevron::detail {

// Bits: what an activation slot still stores for its stage and microbatch.
inline constexpr std::uint8_t holds_graph = 1;      // autograd graph: until B or W
inline constexpr std::uint8_t holds_outputs = 2;    // outputs: until sent, or read by the next stage on this rank
inline constexpr std::uint8_t holds_gradients = 4;  // input gradients: until sent, or read by the previous stage here

/// Follows the content of each slot, instruction by instruction: a finding if needed content is overwritten, if an instruction
/// reads content that is not there, or if a slot is not freed at the end.
constexpr finding check_slots(program_view const& program) {
  plan_view const& plan = program.plan;
  int const micro_batches = plan.size.units();
  int const cells = plan.stages * micro_batches;
  buffer<std::uint16_t> arrived_memory(2 * cells, zeroed);  // receive slot of each input and gradient, plus 1; 0: none
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
      action const a = one.op;
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      if (is_receive(a.kind)) {
        if (receive_live[one.source] != 0)
          return program_finding(law::slots, r, at, a,
                                 " is received into the slot of a message that is still needed: ", receive.data[one.source]);
        receive.data[one.source] = a;
        receive_live[one.source] = 1;
        arrived[a.kind == kind::receive_forward ? cell : cells + cell] = static_cast<std::uint16_t>(one.source + 1);
      } else if (is_send(a.kind)) {
        bool const forward = a.kind == kind::send_forward;
        std::uint8_t const what = forward ? holds_outputs : holds_gradients;
        if (!has(one.slot, what, stage, a))
          return program_finding(law::slots, r, at, a,
                                 forward ? " sends from a slot that does not hold the outputs of "
                                         : " sends from a slot that does not hold the input gradients of ",
                                 beside(a, forward ? kind::forward : kind::backward));
        if (send_live[one.source] != 0)
          return program_finding(law::slots, r, at, a, " takes the send slot of ", send.data[one.source]);
        holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] & ~what);
        send.data[one.source] = a;
        send_live[one.source] = 1;
      } else if (is_wait(a.kind)) {
        if (send_live[one.source] == 0 || !(send.data[one.source] == send_of_wait(a)))
          return program_finding(law::slots, r, at, a, " waits for a send slot that does not hold ", send_of_wait(a));
        send_live[one.source] = 0;
      } else if (is_compute(a.kind) && !is_own(a.kind)) {
        bool const forward = a.kind == kind::forward;
        int const from = step_graph(plan).from(a);
        if (!forward && !has(one.slot, holds_graph, stage, a))
          return program_finding(law::slots, r, at, a, " needs a slot that no longer holds ", beside(a, kind::forward));
        if (from >= 0 && plan.rank_of[from] == r) {
          std::uint8_t const what = forward ? holds_outputs : holds_gradients;
          if (!has(one.local, what, from, a))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold the results of ",
                                   beside(a, forward ? kind::forward : kind::backward, from - stage));
          holds[one.local] = static_cast<std::uint8_t>(holds[one.local] & ~what);
        } else if (from >= 0) {
          action const wanted = receive_for(a);
          if (receive_live[one.source] == 0 || !(receive.data[one.source] == wanted))
            return program_finding(law::slots, r, at, a, " reads a slot that does not hold ", wanted);
        }
        if (forward) {
          if (holds[one.slot] != 0)
            return program_finding(law::slots, r, at, a,
                                   " writes to the slot of an activation that is still needed: ", activation.data[one.slot]);
          activation.data[one.slot] = a;
          // The last stage's outputs go to the loss or to the caller at once.
          holds[one.slot] =
              static_cast<std::uint8_t>((plan.forward_only ? 0 : holds_graph) | (stage + 1 < plan.stages ? holds_outputs : 0));
        } else if (makes_input_gradient(a.kind) && stage > 0) {
          holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] | holds_gradients);
        }
        if (plan.forward_only || ends_cell(a.kind)) {
          holds[one.slot] = static_cast<std::uint8_t>(holds[one.slot] & ~holds_graph);
          // The received input and gradient of the stage are freed with the graph.
          if (int const slot = arrived[cell]; slot != 0) receive_live[slot - 1] = 0;
          if (int const slot = arrived[cells + cell]; slot != 0) receive_live[slot - 1] = 0;
        }
      }
    }
    // Every slot must be free at the end.
    for (int s = 0; s < counts.activation; ++s) {
      if (holds[s] == 0) continue;
      action const kept = activation.data[s];
      return program_finding(law::slots, r, -1, kept,
                             (holds[s] & holds_outputs) != 0
                                 ? " leaves outputs behind that no action sends or takes: there is no send for "
                                 : " leaves input gradients behind that no action sends or takes: there is no send for ",
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
                             wait_for_send(sent));
    }
  }
  return {};
}

}  // namespace chevron::detail
