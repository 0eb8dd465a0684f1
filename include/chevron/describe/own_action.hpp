#pragma once

#include <cstdint>

#include <chevron/describe/token.hpp>
#include <chevron/plan/kinds.hpp>

/// \file
/// Actions of a user's own, as letters of a description.

namespace chevron {

/// Some kinds, by their letters: `{B, W}`.
struct kind_set {
  std::uint8_t bits = 0;

  /// No kind.
  constexpr kind_set() = default;
  /// The kinds of these letters.
  template <kind... Kinds>
  constexpr kind_set(token<Kinds>...) : bits((0 | ... | kind_bit(Kinds))) {}  // NOLINT: letters are a set of kinds
};

/// The order of a user's own action beside the other actions of its stage and microbatch.
struct own_row {
  kind_set after = {};   ///< kinds that run before the action, where the plan has them
  kind_set before = {};  ///< kinds that run after the action, where the plan has them
  bool every = false;    ///< a plan without one for each stage and microbatch is refused
};

/// A letter for work of a user's own: X, Y or Z. A description draws it like the other letters, in the order of the forwards, or
/// of the backwards where it comes after one; the proof holds it to its row, and to one for each stage and microbatch at most;
/// timelines and pictures show it (`costs::own`); a trainer runs `trainer_options::own_actions` for it, on the rank of its stage
/// (proof: prove/check.hpp; run: run/execution/stage_runner.hpp).
///
/// ```cpp
/// inline constexpr auto X = chevron::own_action<'X'>({.after = {W}});
/// inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, I, W, X) | cooldown(I, W,
/// X));
/// ```
template <char Letter>
constexpr auto own_action(own_row const& row) {
  static_assert(Letter >= 'X' && Letter <= 'Z', "an action of your own is called X, Y or Z: own_action<'X'>({})");
  constexpr int number = Letter >= 'X' && Letter <= 'Z' ? Letter - 'X' : 0;
  return token<static_cast<kind>(static_cast<int>(kind::own_x) + number)>{
      .stands = {.after = row.after.bits, .before = row.before.bits, .every = row.every, .declared = true}};
}

}  // namespace chevron
