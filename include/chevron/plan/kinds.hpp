#pragma once

#include <cstdint>

/// \file
/// The kinds of action, a row each: spelling, whose result an action takes, to which stage it hands its own, its order beside
/// other actions of its cell, and memory.

namespace chevron {

/// What an action does. The first four compute and are all a *plan* holds; the others appear only in a lowered *program*.
/// Letters follow PyTorch: `F` forward, `B` full backward, `I` input gradient, `W` weight gradient. (The zero-bubble papers
/// write B for our I; DeepSeek writes B for our B.)
enum class kind : std::uint8_t {
  forward,             ///< F: run a stage on a microbatch
  backward,            ///< B: input and weight gradients at once
  backward_input,      ///< I: the gradient of the stage's input only
  backward_weight,     ///< W: the gradients of the stage's parameters, after its I
  send_forward,        ///< SEND_F: hand the output of a stage to the next stage's rank
  receive_forward,     ///< RECV_F: post the receive of a stage's input
  send_backward,       ///< SEND_B: hand the input gradient of a stage to the previous stage's rank
  receive_backward,    ///< RECV_B: post the receive of a stage's output gradient
  wait_send_forward,   ///< WAIT_SEND_F: the output may be reused from here on
  wait_send_backward,  ///< WAIT_SEND_B: the input gradient may be reused from here on
  reduce_gradients,    ///< REDUCE_GRAD: start the sum of a stage's gradients over its replicas
  optimizer_step       ///< OPTIMIZER_STEP: wait for the sums, check, clip, step
};

inline constexpr int compute_kinds = 4;
inline constexpr int program_kinds = 12;

/// One kind. A *cell* is a (stage, microbatch); results that cross stages are outputs, which go to the stage behind, and input
/// gradients, which go to the stage before.
struct kind_row {
  char const* letters;  ///< as PyTorch spells the kind
  int from = 0;         ///< relative to its stage, the stage whose result it takes: -1 an output, +1 an input gradient; 0: none
  int to = 0;           ///< relative to its stage, the stage that takes its result: +1, -1; 0: none
  std::uint8_t after = 0;     ///< bits of kinds: these run before it in its cell
  std::uint8_t excludes = 0;  ///< bits of kinds: none of these runs in its cell
  int in_flight = 0;          ///< by how much the chunks in flight change once it has run
};

constexpr std::uint8_t kind_bit(kind k) { return static_cast<std::uint8_t>(1 << static_cast<int>(k)); }

/// By kind.
inline constexpr kind_row kind_rows[program_kinds] = {
    {.letters = "F", .from = -1, .to = 1, .in_flight = 1},
    {.letters = "B",
     .from = 1,
     .to = -1,
     .after = kind_bit(kind::forward),
     .excludes = kind_bit(kind::backward_input) | kind_bit(kind::backward_weight),
     .in_flight = -1},
    {.letters = "I", .from = 1, .to = -1, .after = kind_bit(kind::forward), .excludes = kind_bit(kind::backward)},
    {.letters = "W", .after = kind_bit(kind::backward_input), .excludes = kind_bit(kind::backward), .in_flight = -1},
    {.letters = "SEND_F", .to = 1},
    {.letters = "RECV_F", .from = -1},
    {.letters = "SEND_B", .to = -1},
    {.letters = "RECV_B", .from = 1},
    {.letters = "WAIT_SEND_F", .to = 1},
    {.letters = "WAIT_SEND_B", .to = -1},
    {.letters = "REDUCE_GRAD"},
    {.letters = "OPTIMIZER_STEP"},
};

constexpr kind_row const& row_of(kind k) { return kind_rows[static_cast<int>(k)]; }

constexpr bool is_compute(kind k) { return static_cast<int>(k) < compute_kinds; }
/// F alone.
constexpr bool makes_output(kind k) { return is_compute(k) && row_of(k).to > 0; }
/// B and I.
constexpr bool makes_input_gradient(kind k) { return is_compute(k) && row_of(k).to < 0; }

/// B and W: the last of their cell.
constexpr bool ends_cell(kind k) { return row_of(k).in_flight < 0; }

/// I: its W comes later.
constexpr bool leaves_weight(kind k) { return makes_input_gradient(k) && !ends_cell(k); }

/// B, or I where backwards are split.
constexpr kind gradient_kind(bool split) { return split ? kind::backward_input : kind::backward; }
/// A stage's work on a microbatch in its order: F is 0, B or I 1, W 2.
constexpr int family_of(kind k) { return k == kind::forward ? 0 : k == kind::backward_weight ? 2 : 1; }
constexpr kind kind_of_family(int family, bool split) {
  return family == 0 ? kind::forward : family == 1 ? gradient_kind(split) : kind::backward_weight;
}

/// The kind as PyTorch spells it.
constexpr char const* letters_of(kind k) { return static_cast<int>(k) < program_kinds ? row_of(k).letters : "?"; }

/// By how much an action changes the number of chunks in flight once it has run. A pass without backwards keeps none.
constexpr int in_flight_change(kind k, bool forward_only) { return forward_only ? 0 : row_of(k).in_flight; }

}  // namespace chevron
