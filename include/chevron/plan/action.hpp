#pragma once

#include <cstdint>

#include <chevron/plan/kinds.hpp>
#include <chevron/plan/text.hpp>

/// \file
/// One action of a rank, stored in four bytes.

namespace chevron {

inline constexpr int max_stages = 1024;
inline constexpr int max_micro_batches = 65535;

/// One action: a kind of work, on one stage, for one microbatch. The text `3F0` means stage 3, forward, microbatch 0. If
/// sequences are cut into slices, `micro_batch` is the number of a unit (shape.hpp): with two slices per microbatch, the
/// forward of unit 5 on stage 3 is `3F2.1`.
///
/// A *fused pair* (DeepSeek's overlapped forward and backward, PyTorch's OVERLAP_F_B) is two successive actions of a rank: an F
/// with `fused` set, then a B or I. The rank runs the pair as one action, which starts when the inputs of both halves have
/// arrived and has computed both results at its end. `==` compares kind, stage and microbatch, not `fused`.
struct action {
  chevron::kind kind : 5;
  std::uint32_t fused : 1;  ///< this F and the rank's next action form a fused pair
  std::uint32_t stage : 10;
  std::uint32_t micro_batch : 16;

  friend constexpr bool operator==(action a, action b) {
    return a.kind == b.kind && a.stage == b.stage && a.micro_batch == b.micro_batch;
  }
};
static_assert(sizeof(action) == 4, "an action is four bytes: constant evaluation and traces rely on it");

constexpr action make_action(kind what, int stage, int micro_batch) {
  return action{what, 0, static_cast<std::uint32_t>(stage) & 0x3ffu, static_cast<std::uint32_t>(micro_batch) & 0xffffu};
}

/// Appends the text of a unit: the microbatch's number and, with several slices, a point and the slice's number.
constexpr void append_unit(text& out, int unit, int slices) {
  out.append(unit / slices);
  if (slices > 1) out.append('.').append(unit % slices);
}

/// Appends the text of an action. \param slices number of slices per microbatch in the action's plan
constexpr void append(text& out, action a, int slices = 1) {
  if (a.kind == kind::optimizer_step) {
    out.append(letters_of(a.kind));
    return;
  }
  out.append(static_cast<int>(a.stage));
  out.append(letters_of(a.kind));
  if (!is_of_stage(a.kind)) append_unit(out, static_cast<int>(a.micro_batch), slices);
}

/// A fused pair to be written as text: `(0F7;7B3)OVERLAP_F_B`, PyTorch's notation.
struct fused_pair {
  action forward_half;
  action backward_half;
};

constexpr void append(text& out, fused_pair pair, int slices = 1) {
  out.append('(');
  append(out, pair.forward_half, slices);
  out.append(';');
  append(out, pair.backward_half, slices);
  out.append(")OVERLAP_F_B");
}

/// Returns the text of an action or a fused pair, of a plan with `slices` slices per microbatch.
template <class Action>
constexpr text to_text(Action const& one, int slices) {
  text out;
  append(out, one, slices);
  return out;
}

}  // namespace chevron
