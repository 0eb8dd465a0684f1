#pragma once

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/search/anneal.hpp>
#include <chevron/search/find.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/pattern.hpp>
#include <chevron/search/start.hpp>

/// \file
/// A search that is small enough for a compiler: what is known at one limit, improved there.

namespace chevron::search {

namespace detail {

/// Whether a schedule's stages live where the plan says.
template <class Schedule>
constexpr bool lives_on(plan const& placed, Schedule const& one) {
  if (stages_of(one, placed.size) != placed.stages) return false;
  for (int s = 0; s < placed.stages; ++s) {
    if (one.where.rank_of(s, placed.size) != placed.rank_of.data[s]) return false;
  }
  return true;
}

/// Makes a periodic order of the actions of `order`, if one is found; gives its length, or -1.
constexpr double make_periodic(plan& order, cost_view const& costs, activation_limit memory, objective goal, effort how_hard,
                               double bound, int& tried) {
  patterns repeat(order, costs, memory, goal, how_hard.seed, 1);
  tried += repeat.run(how_hard.trials, bound, .3);
  if (!repeat.exists()) return -1;
  order.name = "a periodic order";
  for (int i = 0; i < order.actions.count; ++i) order.actions.data[i] = repeat.best_action(i);
  return repeat.best_length();
}

/// The search itself, for a plan without actions that says where the stages are.
constexpr found improve(plan const& placed, cost_view const& costs, activation_limit memory, objective goal, effort how_hard,
                        work_graph work) {
  bool const split = work == work_graph::split_backward;
  found result;
  if (finding const f = refusal(placed, memory)) {
    result.best = chevron::detail::refused(placed.size, "searched", f);
    return result;
  }
  unsplit_costs const whole(placed, costs);
  lower_bounds const least = bounds(placed, split ? costs : whole.view(costs), memory);
  result.bound = goal == objective::makespan ? least.makespan : least.span;

  // Schedules of other placements are not worked out: in a compiler that costs as much as hundreds of trials.
  starting_point start(placed, costs, memory, goal, split);
  catalogue::for_each([&](auto const& one) {
    if (lives_on(placed, one)) start.consider(expand(one, placed.size), one.name);
  });
  if (start.exists()) {
    result.published = copy_of(start.shortest);
    result.published_length = start.shortest_length;
  }
  bool in_line = split && placed.stages == placed.size.ranks;
  for (int s = 0; s < placed.stages; ++s) in_line = in_line && placed.rank_of.data[s] == s;
  bool const reached = start.exists() && start.shortest_length <= result.bound * (1 + 1e-12);
  if (!reached) {
    add_list_schedules(start, placed, costs, memory, split);
    if (in_line) add_zero_bubble(start, placed.size, costs, memory, goal);
  }
  if (!start.exists()) {
    result.best = chevron::detail::refused(placed.size, "searched", nothing_found(placed));
    return result;
  }
  result.start = start.shortest.name;
  result.length = start.shortest_length;
  result.best = copy_of(start.shortest);
  if (result.optimal()) return finished(result, memory);

  auto const take = [&](plan const& made, double played_length) {
    // Local search takes every wire to be free: what messages wait for it, the simulation says.
    double const length = costs.occupies_wire() ? length_of(goal, made, costs) : played_length;
    if (length >= result.length) return;
    result.start = made.name;
    result.length = length;
    result.best = copy_of(made);
  };
  auto const improve_from = [&](plan made, int trials) {
    annealing search(made, costs, memory, goal, how_hard.seed);
    result.trials += search.run(trials, result.bound);
    for (int i = 0; i < made.actions.count; ++i) made.actions.data[i] = search.best_action(i);
    take(made, search.best_length());
  };
  int trials = how_hard.trials > 0 ? how_hard.trials : 1000;
  if (memory.most > 0 && 10 * memory.most <= 6 * placed.stages) {  // with more memory periodic orders end longer
    plan repeated = copy_of(start.apart);
    effort const few{trials / 20, how_hard.seed};
    double const length = make_periodic(repeated, costs, memory, goal, few, result.bound, result.trials);
    if (length >= 0) {
      // One that is shorter has all trials; a longer one half of them, since it often ends shorter.
      bool const shorter = length < start.apart_length;
      take(repeated, length);
      improve_from(static_cast<plan&&>(repeated), shorter ? trials : trials / 2);
      trials = shorter ? 0 : trials - trials / 2;
    }
  }
  if (trials > 0) improve_from(copy_of(start.apart), trials);
  return finished(result, memory);
}

}  // namespace detail

/// The shortest of what is known at one limit (the catalogue's schedules, the zero-bubble paper's rule, list schedules and, where
/// memory is short, periodic orders), improved by local search. Never longer than the best of the catalogue that lives on this
/// placement and keeps the limit; mostly longer than what `find` finds, which comes up from smaller limits and tries for longer.
/// With 8 ranks and 32 microbatches a compiler does it in seconds, and finds what the running program finds.
///
/// \param how_hard `trials` of local search, 0: 1000. A twentieth as many periodic orders are tried
/// \returns as `find`
template <placement_policy Placement>
constexpr found improve(Placement const& where, shape size, cost_view const& costs, activation_limit memory = {},
                        objective goal = objective::makespan, effort how_hard = {},
                        work_graph work = work_graph::split_backward) {
  plan placed;
  finding f = chevron::detail::begin_plan(where, size, placed);
  placed.begin = buffer<int>(size.ranks + 1, zeroed);
  if (!f) f = chevron::detail::check_placement(placed);
  if (!f) return detail::improve(placed, costs, memory, goal, how_hard, work);
  found nothing;
  nothing.best = chevron::detail::refused(size, "searched", f);
  return nothing;
}

}  // namespace chevron::search
