#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/shape.hpp>
#include <chevron/prove/proved_plan.hpp>

/// \file
/// A program: for each rank one list of instructions, complete with communication and the place of every tensor.

namespace chevron {

inline constexpr std::uint16_t no_slot = 0xffff;
inline constexpr std::int16_t no_peer = -1;

/// One instruction. Which fields count depends on the action's kind:
///
// clang-format off
/// | kind                   | peer  | slot                | source            | local               |
/// |------------------------|-------|---------------------|-------------------|---------------------|
/// | F                      | –     | its activation      | of its input      | of stage - 1        |
/// | B, I                   | –     | its activation      | of its gradient   | of stage + 1        |
/// | W, R                   | –     | its activation      | –                 | –                   |
/// | X, Y, Z                | –     | –                   | –                 | –                   |
/// | SEND_F, SEND_B         | to    | that holds the data | its send slot     | –                   |
/// | RECV_F, RECV_B         | from  | –                   | its receive slot  | –                   |
/// | WAIT_SEND_F, _B        | to    | –                   | its send slot     | –                   |
/// | REDUCE_GRAD, OPTIMIZER_STEP | – | –                  | –                 | –                   |
// clang-format on
///
/// - An activation slot keeps inputs, outputs and graph of one (stage, microbatch) from its F until its B or W, which frees it.
/// - The source of F, B and I is the receive slot of what they consume. It is `no_slot` where nothing is received: stage 0's
///   input, the last stage's gradient, or a neighbour on this rank. Then `local` is that neighbour's activation slot.
/// - A SEND stands directly after the F, B or I whose output or input gradient it sends. Its send slot is free after the
/// WAIT_SEND.
///
/// SEND actions carry the stage that sends, RECV actions the stage that receives: `2SEND_F0` meets `3RECV_F0`.
struct instruction {
  action op;
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

/// A program that owns its memory, its plan included: as a file may hold it, lawful or not. What runs is a `proved_program`.
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

/// A program whose size is part of its type: where `lowered<>` keeps it.
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

namespace detail {
template <auto const& Source, shape Size>
struct lowering;
}

/// A program that may run. Only `lower` makes one, of a proved plan, and `lowered<>`: that of `lower` owns its program, that of
/// `lowered<>` is a handle to a constant. Either may be held by value and copied.
class proved_program {
 public:
  /// The program, for as long as this lives. Not of a temporary: it would point to what is gone.
  constexpr program_view view() const& { return owned_.begin.count > 0 ? owned_.view() : constant_; }
  constexpr program_view view() const&& = delete;
  constexpr operator program_view() const& { return view(); }
  constexpr operator program_view() const&& = delete;

  /// A copy to look into or to change; nothing runs it.
  constexpr program copy() const {
    program_view const from = view();
    program to;
    if (owned_.begin.count > 0) return owned_;
    int const ranks = from.plan.size.ranks;
    to.source = copy_of(from.plan);
    to.instructions = buffer<instruction>(from.total());
    to.begin = buffer<int>(ranks + 1);
    to.slots = buffer<slot_counts>(ranks);
    for (int i = 0; i < from.total(); ++i) to.instructions.data[i] = from.instructions[i];
    for (int r = 0; r <= ranks; ++r) to.begin.data[r] = from.begin[r];
    for (int r = 0; r < ranks; ++r) to.slots.data[r] = from.slots[r];
    return to;
  }

 private:
  friend constexpr proved_program lower(proved_plan source);
  template <auto const& Source, shape Size>
  friend struct detail::lowering;

  constexpr explicit proved_program(program made) : owned_(static_cast<program&&>(made)) {}
  constexpr explicit proved_program(program_view constant) : constant_(constant) {}

  program owned_;            // empty in a handle to a constant
  program_view constant_{};  // empty where the program is owned
};

/// The forwards of a program's plan; to be proved and lowered again.
constexpr plan forward_part(program_view const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.plan, micro_batches);
}
constexpr plan forward_part(proved_program const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.view().plan, micro_batches);
}

}  // namespace chevron
