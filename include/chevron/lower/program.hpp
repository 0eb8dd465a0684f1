#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A program: for each rank one list of instructions, complete with communication and the place of every tensor.

namespace chevron {

inline constexpr std::uint16_t no_slot = 0xffff;
inline constexpr std::int16_t no_peer = -1;

/// One instruction. Which fields count depends on the action's kind:
///
/// | kind | peer | slot | source |
/// |---|---|---|---|
/// | F | – | activation slot that keeps inputs, outputs and graph until B or W | receive slot of its input; `no_slot` on stage 0
/// or when the previous stage is on this rank (then `local` names that stage's activation slot) | | B, I | – | activation slot |
/// receive slot of its output gradient; `no_slot` on the last stage or when the next stage is on this rank (then `local` names
/// that stage's activation slot, which holds the gradient) | | W | – | activation slot; free afterwards | – | | SEND_F, SEND_B |
/// rank that receives | activation slot whose output (or input gradient) is sent; directly after its F, B or I | send slot that
/// keeps the transfer | | WAIT_SEND_F, WAIT_SEND_B | rank that receives | – | send slot; free afterwards | | RECV_F, RECV_B |
/// rank that sends | – | receive slot the tensors go to | | REDUCE_GRAD, OPTIMIZER_STEP | – | – | – |
///
/// SEND actions carry the stage that sends, RECV actions the stage that receives: `2SEND_F0` meets `3RECV_F0`.
struct instruction {
  action what;
  std::int16_t peer;
  std::uint16_t slot;
  std::uint16_t source;
  std::uint16_t local;
};

/// How many slots of each sort one rank needs. Receive slots are numbered over the whole rank; two messages of different
/// stages or directions never share one, so each slot has one shape.
struct slot_counts {
  int activation;
  int receive;
  int send;
};

/// A program seen from outside.
struct program_view {
  plan_view plan{};
  instruction const* instructions = nullptr;
  int const* begin = nullptr;          ///< rank r owns instructions [begin[r], begin[r + 1])
  slot_counts const* slots = nullptr;  ///< per rank

  constexpr int total() const { return begin[plan.size.ranks]; }
  constexpr int length(int rank) const { return begin[rank + 1] - begin[rank]; }
  constexpr instruction const& at(int rank, int position) const { return instructions[begin[rank] + position]; }
};

/// A program that owns its memory, its plan included.
struct program {
  chevron::plan source;
  buffer<instruction> instructions;
  buffer<int> begin;
  buffer<slot_counts> slots;

  constexpr program_view view() const& { return {source.view(), instructions.data, begin.data, slots.data}; }
  constexpr operator program_view() const& { return view(); }
  // They would point to what is gone: keep the program.
  constexpr program_view view() const&& = delete;
  constexpr operator program_view() const&& = delete;
};

/// A program whose size is part of its type: what `lowered<>` gives.
template <int Ranks, int Stages, int Actions, int Instructions>
struct static_program {
  static_plan<Ranks, Stages, Actions> source;
  instruction instructions[array_size(Instructions)];
  int begin[array_size(Ranks + 1)];
  slot_counts slots[array_size(Ranks)];

  constexpr program_view view() const& { return {source.view(), instructions, begin, slots}; }
  constexpr operator program_view() const& { return view(); }
  // They would point to what is gone: keep the program.
  constexpr program_view view() const&& = delete;
  constexpr operator program_view() const&& = delete;
};

/// The forwards of a program's plan; to be lowered again.
constexpr plan forward_part(program_view const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.plan, micro_batches);
}
constexpr plan forward_part(program const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.source, micro_batches);
}

}  // namespace chevron
