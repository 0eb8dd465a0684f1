#pragma once

#include <cstdint>

/// \file
/// The kinds of action, a row each: spelling, whose result an action takes, to which stage it hands its own, its order beside
/// other actions of its cell and beside other slices, and memory.

namespace chevron {

/// What an action does. The first eight compute and are all a *plan* holds; the others appear only in a lowered *program*.
/// Letters follow PyTorch: `F` forward, `B` full backward, `I` input gradient, `W` weight gradient. (The zero-bubble papers
/// write B for our I; DeepSeek writes B for our B.)
enum class kind : std::uint8_t {
  forward,          ///< F: run a stage on a microbatch
  backward,         ///< B: input and weight gradients at once
  backward_input,   ///< I: the gradient of the stage's input only
  backward_weight,  ///< W: the gradients of the stage's parameters, after its I
  recompute,        ///< R: run the stage forward again, from its inputs, before its B or I
  own_x,            ///< X, Y, Z: a user's own work on a stage and a microbatch (describe/own_action.hpp)
  own_y,
  own_z,
  send_forward,        ///< SEND_F: hand the output of a stage to the next stage's rank
  receive_forward,     ///< RECV_F: post the receive of a stage's input
  send_backward,       ///< SEND_B: hand the input gradient of a stage to the previous stage's rank
  receive_backward,    ///< RECV_B: post the receive of a stage's output gradient
  wait_send_forward,   ///< WAIT_SEND_F: the output may be reused from here on
  wait_send_backward,  ///< WAIT_SEND_B: the input gradient may be reused from here on
  reduce_gradients,    ///< REDUCE_GRAD: start the sum of a stage's gradients over its replicas
  optimizer_step,      ///< OPTIMIZER_STEP: wait for the sums, check, clip, step
  unshard              ///< UNSHARD: wait until this replica has a stage's parameters whole, of a sharded optimizer
};

inline constexpr int compute_kinds = 8;
inline constexpr int program_kinds = 17;
static_assert(compute_kinds <= 8 && program_kinds <= 32,
              "sets of compute kinds have 8 bits (kind_bit), a kind has 5 in an action");

/// One kind. A *cell* is a (stage, microbatch); results that cross stages are outputs, which go to the stage behind, and input
/// gradients, which go to the stage before.
struct kind_row {
  char const* letters;     ///< as PyTorch spells the kind
  char const* words = "";  ///< of a compute kind, for legends
  int from = 0;  ///< relative to its stage, the stage whose result it takes: -1 an output, +1 an input gradient; 0: none
  int to = 0;    ///< relative to its stage, the stage that takes its result: +1, -1; 0: none
  std::uint8_t after = 0;     ///< bits of kinds: these run before it in its cell
  std::uint8_t excludes = 0;  ///< bits of kinds: none of these runs before it in its cell
  int in_flight = 0;          ///< by how much the chunks in flight change once it has run
  int carry = 0;  ///< relative to its slice, the slice whose carry it takes on its own stage: -1 what F carries, +1 gradients
};

constexpr std::uint8_t kind_bit(kind k) { return static_cast<std::uint8_t>(1 << static_cast<int>(k)); }

/// By kind.
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
/// SEND_F and SEND_B.
constexpr bool is_send(kind k) { return k == kind::send_forward || k == kind::send_backward; }
/// RECV_F and RECV_B.
constexpr bool is_receive(kind k) { return k == kind::receive_forward || k == kind::receive_backward; }
/// WAIT_SEND_F and WAIT_SEND_B.
constexpr bool is_wait(kind k) { return k == kind::wait_send_forward || k == kind::wait_send_backward; }
/// REDUCE_GRAD and UNSHARD: once a step for a stage, of no microbatch.
constexpr bool is_of_stage(kind k) { return k == kind::reduce_gradients || k == kind::unshard; }
/// F, B and I: their results go to other stages. They stand first, so that inner loops ask with one comparison.
constexpr bool hands_on(kind k) { return k < kind::backward_weight; }
/// F alone.
constexpr bool makes_output(kind k) { return is_compute(k) && row_of(k).to > 0; }
/// B and I.
constexpr bool makes_input_gradient(kind k) { return is_compute(k) && row_of(k).to < 0; }

inline constexpr int own_kinds = 3;
/// X, Y and Z.
constexpr bool is_own(kind k) { return k >= kind::own_x && k <= kind::own_z; }
/// Which of the user's own kinds, from 0.
constexpr int own_number(kind k) { return static_cast<int>(k) - static_cast<int>(kind::own_x); }

/// The order of a user's own action among the actions of the same stage and microbatch.
struct own_kind {
  std::uint8_t after = 0;   ///< bits of kinds: if the plan has these for the same stage and microbatch, they run before it
  std::uint8_t before = 0;  ///< bits of kinds: these run after it
  bool every = false;       ///< each stage has one for each microbatch, except in a pass without backwards
  bool declared = false;    ///< the plan may hold it

  /// Whether a description lists the action in the order of the forwards: no backward must run before it.
  constexpr bool draws_forwards() const { return (after & ~kind_bit(kind::forward)) == 0; }
};

/// B and W: the last of their stage and microbatch.
constexpr bool ends_cell(kind k) { return row_of(k).in_flight < 0; }

/// B, I and W, which may add to gradients of parameters.
constexpr bool runs_backward(kind k) { return is_compute(k) && (makes_input_gradient(k) || ends_cell(k)); }

/// I: its W comes later.
constexpr bool leaves_weight(kind k) { return makes_input_gradient(k) && !ends_cell(k); }

/// B, or I where backwards are split.
constexpr kind gradient_kind(bool split) { return split ? kind::backward_input : kind::backward; }
/// Families of compute kinds, of which a stage's microbatch has one action at most: F is 0, B or I 1, W 2, R 3, X, Y and Z 4
/// to 6.
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

/// By how much an action changes the number of chunks in flight once it has run. A pass without backwards keeps none.
constexpr int in_flight_change(kind k, bool forward_only) { return forward_only ? 0 : row_of(k).in_flight; }

}  // namespace chevron
