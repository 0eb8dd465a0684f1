#pragma once

#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// Computes the peak of an order's activation memory on a rank, and compares it with a limit.

namespace chevron::search::detail {

/// The change of a rank's activation memory by an action of kind `what`, in chunks whose backward has not begun.
constexpr double held_change(kind what, activation_limit const& memory) {
  if (makes_output(what)) return 1;
  if (makes_input_gradient(what)) return ends_cell(what) ? -1 : memory.kept_for_weight - 1;
  return ends_cell(what) ? -memory.kept_for_weight : 0;
}

/// The change of a rank's activation memory by each kind of action, as a function for `peak`.
struct held_changes {
  double by_kind[compute_kinds]{};
  constexpr explicit held_changes(activation_limit const& memory) {
    for (int k = 0; k < compute_kinds; ++k) by_kind[k] = held_change(static_cast<kind>(k), memory);
  }
  constexpr double operator()(action const& a, double& held) const { return held += by_kind[static_cast<int>(a.kind)]; }
};

/// The largest activation memory of any rank at any time, in chunks; a step begins with none.
constexpr double most_held(activation_limit const& memory, plan_view const& plan) {
  return peak<double>(plan, held_changes(memory));
}

constexpr bool keeps(activation_limit const& memory, plan_view const& plan) {
  return !(memory.most > 0) || most_held(memory, plan) <= memory.most + activation_limit::rounding;
}
/// Whether one rank keeps the limit.
constexpr bool keeps(activation_limit const& memory, plan_view const& plan, int rank) {
  double const limit = memory.most + activation_limit::rounding;
  return !(memory.most > 0) || peak<double>(plan, rank, held_changes(memory), 0, limit).most <= limit;
}

}  // namespace chevron::search::detail
