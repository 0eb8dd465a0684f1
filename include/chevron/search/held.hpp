#pragma once

#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>

/// \file
/// What an order holds at most, and whether that is within a limit.

namespace chevron::search::detail {

/// By how much an action changes what its rank holds, in chunks whose backward has not begun.
constexpr double held_change(kind what, activation_limit const& memory) {
  if (what == kind::forward) return 1;
  if (what == kind::backward) return -1;
  return what == kind::backward_input ? memory.kept_for_weight - 1 : -memory.kept_for_weight;
}

/// The most that any rank holds, run from empty.
constexpr double most_held(activation_limit const& memory, plan_view const& plan) {
  double most = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    double held = 0;
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      held += held_change(plan.actions[i].kind, memory);
      most = held > most ? held : most;
    }
  }
  return most;
}

constexpr bool keeps(activation_limit const& memory, plan_view const& plan) {
  return !(memory.most > 0) || most_held(memory, plan) <= memory.most + activation_limit::rounding;
}

}  // namespace chevron::search::detail
