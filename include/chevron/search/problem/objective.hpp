#pragma once

#include <chevron/prove/timeline.hpp>

/// \file
/// The length that a search makes short.

namespace chevron::search {

/// The length that a search makes short. If an optimizer waits for all ranks, a step takes its makespan; if steps overlap, its
/// span.
enum class objective { makespan, span };

/// The objective's name, as `--objective` takes it.
constexpr char const* name_of(objective goal) { return goal == objective::makespan ? "makespan" : "span"; }

/// The length by an objective, in the costs' unit, of a plan that passes `check`.
constexpr double length_of(objective goal, plan_view const& plan, timeline const& when) {
  return goal == objective::makespan ? makespan(plan, when) : span(plan, when);
}
constexpr double length_of(objective goal, plan_view const& plan, cost_view const& costs) {
  return length_of(goal, plan, simulate(plan, costs));
}

}  // namespace chevron::search
