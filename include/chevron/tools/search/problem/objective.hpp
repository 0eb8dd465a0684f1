#pragma once

#include <chevron/prove/timeline.hpp>

/// \file
/// The length that a search minimizes.

namespace chevron::search {

/// The length that a search minimizes. If an optimizer waits for all ranks, a step takes its makespan; if the steps of ranks
/// overlap, a step takes its span, the longest time of one rank.
enum class objective { makespan, span };

/// The objective's name, a value of `--objective`.
constexpr char const* name_of(objective goal) { return goal == objective::makespan ? "makespan" : "span"; }

/// The length of a plan that passes `check`, by objective `goal`, in the costs' unit.
constexpr double length_of(objective goal, plan_view const& plan, timeline const& when) {
  return goal == objective::makespan ? makespan(plan, when) : span(plan, when);
}
constexpr double length_of(objective goal, plan_view const& plan, cost_view const& costs) {
  return length_of(goal, plan, simulate(plan, costs));
}

}  // namespace chevron::search
