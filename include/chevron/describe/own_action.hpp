#pragma once

#include <cstdint>

#include <chevron/describe/token.hpp>
#include <chevron/plan/kinds.hpp>

/// \file
/// Letters of a description for kinds of actions that a user defines.

namespace chevron {

/// A set of kinds, written by their letters: `{B, W}`.
struct kind_set {
  std::uint8_t bits = 0;

  /// No kind.
  constexpr kind_set() = default;
  /// The kinds of these letters.
  template <kind... Kinds>
  constexpr kind_set(token<Kinds>...) : bits((0 | ... | kind_bit(Kinds))) {}  // NOLINT: letters are a set of kinds
};

/// When a user's own action runs relative to the other actions of its stage and microbatch.
struct own_row {
  kind_set after = {};   ///< kinds that run before the action, if the plan has them
  kind_set before = {};  ///< kinds that run after the action, if the plan has them
  bool every = false;    ///< each stage and microbatch must have the action
};

/// Returns a letter, X, Y or Z, for a user's own work. Like other letters, it takes chunks and microbatches from the order:
/// that of the forwards if `row.after` names no kind but F, otherwise that of the backwards. `check` enforces `row`, and at
/// most one such action for each stage and microbatch (prove/check.hpp). Timelines and pictures show the action, with cost
/// `costs::own`. A trainer calls `trainer_options::own_actions` for it, on the rank of its stage
/// (run/execute/stage_runner.hpp).
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
