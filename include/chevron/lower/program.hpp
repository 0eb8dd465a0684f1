#pragma once

#include <cstdint>

#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/proved_plan.hpp>

/// \file
/// A program: for each rank one list of instructions, complete with communication and with a slot for every tensor.

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
/// | REDUCE_GRAD, UNSHARD   | –     | –                   | –                 | –                   |
/// | OPTIMIZER_STEP         | –     | –                   | –                 | –                   |
// clang-format on
///
/// - An activation slot stores inputs, outputs and autograd graph of one (stage, microbatch) from its F until its B or W or,
///   where the previous stage is on this rank, until that stage has read the gradient, whichever is later (`let_go` in
///   lower.hpp).
/// - `source` of F, B and I is the receive slot of the activation or gradient that it consumes, `no_slot` if none is received:
///   for stage 0's input, the last stage's gradient, or a neighbouring stage on this rank, whose activation slot is `local`.
/// - A SEND stands directly after the F, B or I whose output or input gradient it sends (after both halves of a fused pair).
///   The send slot is free after the WAIT_SEND.
///
/// SEND actions carry the stage that sends, RECV actions the stage that receives: `2SEND_F0` is received by `3RECV_F0`.
struct instruction {
  action op;
  std::int16_t peer;
  std::uint16_t slot;
  std::uint16_t source;
  std::uint16_t local;
};

/// The numbers of slots of each sort that one rank needs. Receive slots are numbered over the whole rank; two messages of
/// different stages or directions never share one, so each slot has one shape.
struct slot_counts {
  int activation;
  int receive;
  int send;
};

/// A program as functions read it: pointers into a program, which must outlive the view.
struct program_view {
  plan_view plan{};
  instruction const* instructions = nullptr;
  int const* begin = nullptr;          ///< rank r owns instructions [begin[r], begin[r + 1])
  slot_counts const* slots = nullptr;  ///< by rank: its numbers of slots

  constexpr int total() const { return begin[plan.size.ranks]; }
  constexpr int length(int rank) const { return begin[rank + 1] - begin[rank]; }
  constexpr instruction const& at(int rank, int position) const { return instructions[begin[rank] + position]; }
};

/// A program that owns its lists.
template <class Plan, class Instructions, class Begin, class Slots>
struct basic_program {
  Plan source;
  Instructions instructions;
  Begin begin;
  Slots slots;

  constexpr program_view view() const& {
    return {source.view(), detail::data_of(instructions), detail::data_of(begin), detail::data_of(slots)};
  }
  constexpr operator program_view() const& { return view(); }
  // Deleted, since the view of a temporary would dangle: keep the program.
  constexpr program_view view() const&& = delete;
  constexpr operator program_view() const&& = delete;
};

/// A program with its plan, from a file for example; either may be unlawful. Only a `proved_program` runs.
struct owned_program : basic_program<plan, buffer<instruction>, buffer<int>, buffer<slot_counts>> {};

/// A program whose size is part of its type; `lowered<>` stores its constant in one.
template <int Ranks, int Stages, int Actions, int Instructions>
using static_program = basic_program<static_plan<Ranks, Stages, Actions>, instruction[array_size(Instructions)],
                                     int[array_size(Ranks + 1)], slot_counts[array_size(Ranks)]>;

namespace detail {
template <auto const& Source, shape Size>
struct lowering;
}

/// A program that may run, as a handle with a reference count: copies share one program, also between threads. Only `lower`,
/// from a proved plan, and `lowered<>` make handles. The last handle frees a program of `lower`; a program of `lowered<>` is a
/// constant.
class proved_program {
 public:
  constexpr proved_program(proved_program const& other) : shared_(other.shared_), seen_(other.seen_) { hold(); }
  constexpr proved_program& operator=(proved_program const& other) {
    other.hold();  // before `let_go`: both may be handles to one program
    let_go();
    shared_ = other.shared_;
    seen_ = other.seen_;
    return *this;
  }
  constexpr ~proved_program() { let_go(); }

  /// A view of the program, valid as long as a handle to the program lives; deleted for a temporary, since the view could
  /// dangle.
  constexpr program_view view() const& { return seen_; }
  constexpr program_view view() const&& = delete;
  constexpr operator program_view() const& { return seen_; }
  constexpr operator program_view() const&& = delete;

  /// A copy to read or to change; a copy cannot run.
  constexpr owned_program copy() const {
    int const ranks = seen_.plan.size.ranks;
    return {{copy_of(seen_.plan), {seen_.instructions, seen_.total()}, {seen_.begin, ranks + 1}, {seen_.slots, ranks}}};
  }

 private:
  friend constexpr proved_program lower(proved_plan source);
  template <auto const& Source, shape Size>
  friend struct detail::lowering;

  struct shared_program {
    owned_program made;
    int handles = 1;

    /// Atomic at run time, since ranks that are threads share one program. A builtin, since `<atomic>` would lengthen every
    /// user's compilation.
    constexpr int count(int by) {
      if (__builtin_is_constant_evaluated()) return handles += by;
      return __atomic_add_fetch(&handles, by, __ATOMIC_ACQ_REL);
    }
  };

  constexpr explicit proved_program(owned_program made)
      : shared_(new shared_program{static_cast<owned_program&&>(made)}), seen_(shared_->made.view()) {}
  constexpr explicit proved_program(program_view constant) : seen_(constant) {}

  constexpr void hold() const {
    if (shared_) shared_->count(1);
  }
  constexpr void let_go() {
    if (shared_ && shared_->count(-1) == 0) delete shared_;
  }

  shared_program* shared_ = nullptr;  // null: the handle refers to a constant
  program_view seen_{};
};

/// A plan of the forwards of a program's first `micro_batches` microbatches; prove and lower the plan to run it.
constexpr plan forward_part(program_view const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.plan, micro_batches);
}
constexpr plan forward_part(proved_program const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.view().plan, micro_batches);
}

}  // namespace chevron
