#pragma once

#include <type_traits>

#include <chevron/describe/expression.hpp>
#include <chevron/describe/limits.hpp>
#include <chevron/describe/list_works.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/tools/search/improve.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/problem.hpp>

/// \file
/// A search as a description: `checked<>` takes it like any other schedule, and the search runs in the compiler.

namespace chevron::search {

/// The description of a schedule that a search finds for given costs and memory. Made by `best`.
template <class Placement, class Costs, class Limits = declared_limits<>>
struct searched_schedule {
  Placement where;
  Costs times;
  work_graph work;
  Limits limits;
  objective goal;
  effort how_hard;
  char const* name;

  /// The same description with a limit of chunks in flight on any rank, counted as `peak_in_flight` does; at least the number of
  /// stages on a rank.
  template <expression::operand Count>
  constexpr auto at_most_in_flight(Count most) const {
    auto const to = limits.with_in_flight(expression::as_node(most));
    return searched_schedule<Placement, Costs, std::remove_const_t<decltype(to)>>{where, times, work, to, goal, how_hard, name};
  }
  /// The same description with another objective; by default the search minimizes the makespan.
  constexpr searched_schedule by(objective other) const { return {where, times, work, limits, other, how_hard, name}; }
  /// The same description with another effort: `trying({.trials = 3000})`. More trials do not always give a shorter schedule.
  constexpr searched_schedule trying(effort other) const { return {where, times, work, limits, goal, other, name}; }
  /// The same description with the name `as`.
  constexpr searched_schedule named(char const* as) const { return {where, times, work, limits, goal, how_hard, as}; }
};

/// Describes the schedule that `improve` finds for these costs. The compiler and the running program find the same schedule.
///
/// ```cpp
/// inline constexpr chevron::costs measured{10, 11, 9, 0.5};
/// inline constexpr auto mine = chevron::search::best(chevron::placement::vee, measured).at_most_in_flight(12);
/// constexpr auto plan = chevron::checked<mine, chevron::shape{.ranks = 8, .micro_batches = 32}>;
/// static_assert(makespan(plan, measured) < 2200 && peak_in_flight(plan) <= 12);
/// ```
///
/// \param where the placement, such as `placement::vee`
/// \param times `costs`, or `stage_costs<N>` for N stages
/// \param work whether backwards are split into I and W
template <placement_policy Placement, class Costs>
constexpr searched_schedule<Placement, Costs> best(Placement where, Costs times, work_graph work = work_graph::split_backward) {
  return {where, times, work, {}, objective::makespan, {}, "searched"};
}

namespace detail {

/// The number of stages that these costs are given for; 0: one cost for all stages.
template <class Costs>
inline constexpr int stages_costed = 0;
template <int Stages>
inline constexpr int stages_costed<stage_costs<Stages>> = Stages;

}  // namespace detail
}  // namespace chevron::search

namespace chevron {

/// The number of actions of a searched schedule at this size.
template <class... Parts>
constexpr int actions_at_most(search::searched_schedule<Parts...> const& what, shape size) {
  return (what.work == work_graph::split_backward ? 3 : 2) * stages_of(what, size) * size.units();
}

/// Searches for the schedule at this size.
/// \returns a plan; if the search finds none, a plan whose `problem` says why
template <class Placement, class Costs, class Limits>
constexpr plan expand(search::searched_schedule<Placement, Costs, Limits> const& what, shape size) {
  plan placed;
  finding f = detail::begin_plan_of(what, size, placed);
  placed.begin = buffer<int>(size.ranks > 0 ? size.ranks + 1 : 1, zeroed);
  if (!f) f = detail::check_placement(placed);
  if (constexpr int costed = search::detail::stages_costed<Costs>; !f && costed != 0 && costed != placed.stages)
    f = detail::fault(law::description, "costs must be given for each stage, and the stages are ", placed.stages, costed);
  if (f) return detail::refused(size, what.name, f);
  activation_limit const memory{static_cast<double>(placed.in_flight_limit), 1};
  search::problem const asked{placed, what.times, memory, what.goal, what.work};
  plan made = search::improve(asked, what.how_hard).best;
  made.name = what.name;
  return made;
}

}  // namespace chevron
