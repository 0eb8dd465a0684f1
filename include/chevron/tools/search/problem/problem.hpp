#pragma once

#include <concepts>

#include <chevron/describe/list_works.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/search/problem/objective.hpp>

/// \file
/// The problem of a search: the ranks of the stages, costs, a memory limit, and the objective.

namespace chevron {

/// The size of a plan and the rank of each stage, without actions, which a search adds.
struct placed_stages : plan {
  constexpr placed_stages() = default;
  /// Copies size, ranks of stages and `problem` of any plan, but neither its actions nor its limits.
  template <std::convertible_to<plan_view> Plan>
  constexpr placed_stages(Plan const& from) {  // NOLINT: a plan says where stages are
    plan_view const given = from;
    size = given.size;
    stages = given.stages;
    problem = given.problem;
    begin = buffer<int>(size.ranks + 1, zeroed);
    rank_of = {given.rank_of, stages};
  }
};

/// Puts stages on ranks.
/// \param where `placement::linear`, `loop`, `vee`, `wave<n>` or a map
/// \returns the placed stages; if the placement does not exist at this size, their `problem` says why, and searches return it
template <placement_policy Placement>
constexpr placed_stages placed_on(Placement const& where, shape size) {
  plan made;
  finding f = detail::begin_plan(where, size, made);
  if (!f) f = detail::check_placement(made);
  if (f) return detail::refused(size, "", f);
  return made;
}

namespace search {

/// One unit of time for each F, I and W, none for messages.
inline constexpr costs equal_costs{};

/// The input of a search. Owns the ranks of stages, but not the costs: the memory behind `costs` must outlive the search.
struct problem {
  placed_stages where{};          ///< `placed_on(placement::vee, {.ranks = 4, .micro_batches = 8})`, or any plan
  cost_view costs = equal_costs;  ///< one cost for each stage or for all, in any unit of time
  activation_limit memory{};      ///< in chunks on a rank; the smallest possible limit is the number of stages on a rank
  objective goal = objective::makespan;
  work_graph work = work_graph::split_backward;  ///< whether backwards are split into I and W

  constexpr bool split() const { return work == work_graph::split_backward; }
  /// The same problem with another memory limit.
  constexpr problem within(activation_limit other) const { return {where, costs, other, goal, work}; }
  /// The same problem with other costs.
  constexpr problem at(cost_view const& other) const { return {where, other, memory, goal, work}; }
};

}  // namespace search
}  // namespace chevron
