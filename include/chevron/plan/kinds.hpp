#pragma once

#include <cstdint>

/// \file
/// The kinds of actions and, in a table with a row for each kind, their properties: PyTorch's letters, the stage whose result
/// an action needs, the stage that needs its result, its order among the actions of its cell and among slices, and its change
/// of memory.

namespace chevron {

/// What an action does. Actions of the first eight kinds compute; a *plan* contains only these. Actions of all other kinds
/// appear only in a *program*, the result of lowering a plan. Letters follow PyTorch: `F` forward, `B` full backward, `I` input
/// gradient, `W` weight gradient. (The zero-bubble papers write B for our I; DeepSeek writes B for our B.)
enum class kind : std::uint8_t {
  forward,          ///< F: run a stage on a microbatch
  backward,         ///< B: input and weight gradients at once
  backward_input,   ///< I: the gradient of the stage's input only
  backward_weight,  ///< W: the gradients of the stage's parameters, after its I
  recompute,        ///< R: run the stage forward again, from its inputs, before its B or I
  own_x,            ///< X, Y, Z: a user's own work on a stage and a microbatch (describe/own_action.hpp)
  own_y,
  own_z,
  send_forward,        ///< SEND_F: send the output of a stage to the next stage's rank
  receive_forward,     ///< RECV_F: post the receive of a stage's input
  send_backward,       ///< SEND_B: send the input gradient of a stage to the previous stage's rank
  receive_backward,    ///< RECV_B: post the receive of a stage's output gradient
  wait_send_forward,   ///< WAIT_SEND_F: wait until SEND_F has ended; the output's memory may then be reused
  wait_send_backward,  ///< WAIT_SEND_B: wait until SEND_B has ended; the input gradient's memory may then be reused
  reduce_gradients,    ///< REDUCE_GRAD: start the sum of a stage's gradients over its replicas
  optimizer_step,      ///< OPTIMIZER_STEP: wait for the sums, check and clip gradients, run the optimizer
  unshard              ///< UNSHARD: wait until a stage's parameters are gathered, after a sharded optimizer's step
};

inline constexpr int compute_kinds = 8;
inline constexpr int program_kinds = 17;
static_assert(compute_kinds <= 8 && program_kinds <= 32,
              "sets of compute kinds have 8 bits (kind_bit), a kind has 5 in an action");

/// The properties of one kind. A *cell* is a pair (stage, microbatch). Results that another stage needs are outputs, for the
/// next stage, and input gradients, for the previous stage.
struct kind_row {
  char const* letters;     ///< PyTorch's name of the kind
  char const* words = "";  ///< a compute kind's name in legends
  int from = 0;  ///< offset to the stage whose result it needs: -1 (an output), +1 (an input gradient) or 0 (none)
  int to = 0;    ///< offset to the stage that needs its result: +1, -1 or 0 (none)
  std::uint8_t after = 0;     ///< the kinds that must run before it in its cell, as bits
  std::uint8_t excludes = 0;  ///< the kinds that must not run before it in its cell, as bits
  int in_flight = 0;          ///< change of the number of chunks in flight once it has run
  int carry = 0;  ///< offset to the slice whose carry it needs, on its own stage: -1 tensors of F, +1 gradients; 0: none
};

constexpr std::uint8_t kind_bit(kind k) { return static_cast<std::uint8_t>(1 << static_cast<int>(k)); }

/// The properties of all kinds, indexed by kind.
inline constexpr kind_row kind_rows[program_kinds] = {
    {.letters = "F", .words = "forward", .from = -1, .to = 1, .in_flight = 1, .carry = -1},
    {.letters = "B",
     .words = "backward",
     .from = 1,
     .to = -1,
     .after = kind_bit(kind::forward),
     .excludes = kind_bit(kind::backward_input) | kind_bit(kind::backward_weight),
     .in_flight = -1,
     .carry = 1},
    {.letters = "I",
     .words = "input gradient",
     .from = 1,
     .to = -1,
     .after = kind_bit(kind::forward),
     .excludes = kind_bit(kind::backward),
     .carry = 1},
    {.letters = "W",
     .words = "weight gradient",
     .after = kind_bit(kind::backward_input),
     .excludes = kind_bit(kind::backward),
     .in_flight = -1},
    {.letters = "R",
     .words = "recomputation",
     .after = kind_bit(kind::forward),
     .excludes = kind_bit(kind::backward) | kind_bit(kind::backward_input)},
    {.letters = "X", .words = "own action X"},
    {.letters = "Y", .words = "own action Y"},
    {.letters = "Z", .words = "own action Z"},
    {.letters = "SEND_F", .to = 1},
    {.letters = "RECV_F", .from = -1},
    {.letters = "SEND_B", .to = -1},
    {.letters = "RECV_B", .from = 1},
    {.letters = "WAIT_SEND_F", .to = 1},
    {.letters = "WAIT_SEND_B", .to = -1},
    {.letters = "REDUCE_GRAD"},
    {.letters = "OPTIMIZER_STEP"},
    {.letters = "UNSHARD"},
};

constexpr kind_row const& row_of(kind k) { return kind_rows[static_cast<int>(k)]; }

constexpr bool is_compute(kind k) { return static_cast<int>(k) < compute_kinds; }
/// Whether a kind is SEND_F or SEND_B.
constexpr bool is_send(kind k) { return k == kind::send_forward || k == kind::send_backward; }
/// Whether a kind is RECV_F or RECV_B.
constexpr bool is_receive(kind k) { return k == kind::receive_forward || k == kind::receive_backward; }
/// Whether a kind is WAIT_SEND_F or WAIT_SEND_B.
constexpr bool is_wait(kind k) { return k == kind::wait_send_forward || k == kind::wait_send_backward; }
/// Whether a kind is REDUCE_GRAD or UNSHARD, which a stage has once in a step, for no particular microbatch.
constexpr bool is_of_stage(kind k) { return k == kind::reduce_gradients || k == kind::unshard; }
/// Whether a kind is F, B or I, whose results go to other stages. These are the first enumerators, so that inner loops need
/// only one comparison.
constexpr bool hands_on(kind k) { return k < kind::backward_weight; }
/// Whether a kind is F.
constexpr bool makes_output(kind k) { return is_compute(k) && row_of(k).to > 0; }
/// Whether a kind is B or I.
constexpr bool makes_input_gradient(kind k) { return is_compute(k) && row_of(k).to < 0; }

inline constexpr int own_kinds = 3;
/// Whether a kind is X, Y or Z.
constexpr bool is_own(kind k) { return k >= kind::own_x && k <= kind::own_z; }
/// The index of an own kind: 0 for X, 1 for Y, 2 for Z.
constexpr int own_number(kind k) { return static_cast<int>(k) - static_cast<int>(kind::own_x); }

/// The order of a user's own action among the actions of the same stage and microbatch.
struct own_kind {
  std::uint8_t after = 0;   ///< kinds, as bits, that run before the own action, if its stage and microbatch have them
  std::uint8_t before = 0;  ///< kinds, as bits, that run after the own action, if its stage and microbatch have them
  bool every = false;       ///< every stage must have it for every microbatch, except in forward-only plans
  bool declared = false;    ///< the plan may contain it

  /// Whether a description lists the action in the order of the forwards: if `after` has no kind but F.
  constexpr bool draws_forwards() const { return (after & ~kind_bit(kind::forward)) == 0; }
};

/// Whether a kind is B or W, the last to compute for its stage and microbatch.
constexpr bool ends_cell(kind k) { return row_of(k).in_flight < 0; }

/// Whether a kind is B, I or W, which may add to gradients of parameters.
constexpr bool runs_backward(kind k) { return is_compute(k) && (makes_input_gradient(k) || ends_cell(k)); }

/// Whether a kind is I, which leaves the weight gradients to a later W.
constexpr bool leaves_weight(kind k) { return makes_input_gradient(k) && !ends_cell(k); }

/// The kind that computes input gradients: I if backwards are split, otherwise B.
constexpr kind gradient_kind(bool split) { return split ? kind::backward_input : kind::backward; }
/// The number of families of compute kinds. F is family 0, B and I are 1, W is 2, R 3, and X, Y and Z are 4 to 6. For each
/// microbatch, a stage has at most one action of each family.
inline constexpr int action_families = 7;
constexpr int family_of(kind k) {
  constexpr int by_kind[compute_kinds] = {0, 1, 1, 2, 3, 4, 5, 6};
  return by_kind[static_cast<int>(k)];
}
constexpr kind kind_of_family(int family, bool split) {
  return family == 0 ? kind::forward : family == 1 ? gradient_kind(split) : kind::backward_weight;
}

/// The kind as PyTorch spells it.
constexpr char const* letters_of(kind k) { return static_cast<int>(k) < program_kinds ? row_of(k).letters : "?"; }

/// The change of the number of chunks in flight once an action of kind `k` has run; 0 in a forward-only plan, which stores no
/// activations.
constexpr int in_flight_change(kind k, bool forward_only) { return forward_only ? 0 : row_of(k).in_flight; }

}  // namespace chevron
