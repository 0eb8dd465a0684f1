#pragma once

#include <cstdint>

#include <chevron/plan/owned_costs.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/search/anneal.hpp>
#include <chevron/search/effort.hpp>
#include <chevron/search/find.hpp>
#include <chevron/search/objective.hpp>
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

/// The search itself, for a plan without actions that says where the stages are.
constexpr found improve(plan const& placed, cost_view const& costs, activation_limit memory, objective goal, effort how_hard,
                        work_graph work) {
  bool const split = work == work_graph::split_backward;
  found result;
  if (finding const f = refusal(placed, memory)) {
    result.best = chevron::detail::refused(placed.size, "searched", f);
    return result;
  }
  owned_costs const whole = unsplit(costs, placed.stages);
  lower_bounds const least = bounds(placed, split ? costs : whole.view(), memory);
  result.bound = goal == objective::makespan ? least.makespan : least.span;

  // Schedules of other placements are not worked out: in a compiler that costs as much as hundreds of trials.
  starting_point start(placed, costs, memory, goal, split);
  catalogue::for_each([&](auto const& one) {
    if (lives_on(placed, one)) start.consider(to_begin_with(expand(one, placed.size), costs), one.name);
  });
  bool const straight = in_line(placed);
  if (straight) {
    for_each_with_slack(placed.size, costs, memory, split, [&](plan const& made) { start.consider(made, made.name); });
  }
  if (start.exists()) {
    result.published = copy_of(start.shortest);
    result.published_length = start.shortest_length;
  }
  bool const reached = start.exists() && start.shortest_length <= result.bound * (1 + 1e-12);
  if (!reached) {
    add_list_schedules(start, placed, costs, memory, split);
    if (straight && split) add_zero_bubble(start, placed.size, costs, memory, goal);
  }
  if (!start.exists()) {
    result.best = chevron::detail::refused(placed.size, "searched", nothing_found(placed, false));
    return result;
  }
  result.start = start.shortest.name;
  result.length = start.shortest_length;
  result.best = copy_of(start.shortest);
  if (result.optimal()) return finished(result, memory);

  watched watch(how_hard.watch);
  watch.now.bound = result.bound;
  watch.now.length = result.length;
  // By playing it: local search and gaps take every wire to be free.
  auto const take = [&](plan const& made) {
    double const length = start.length_of(made);
    if (length < result.length) {
      result.start = made.name;
      result.length = watch.now.length = length;
      result.best = copy_of(made);
    }
    return length;
  };
  auto const improve_from = [&](plan made, int trials) {
    annealing search(made, costs, memory, goal, how_hard.seed);
    result.trials += search.run(trials, result.bound, watch);
    search.write_best(made);
    take(made);
  };
  int trials = how_hard.trials > 0 ? how_hard.trials : 1000;
  if (memory.most > 0 && memory.most < placed.stages) {  // with more memory that many trials find no shorter ones
    int const draws = trials < 2000 ? 1 : 2;
    plan const repeated = periodic_start(start.apart, costs, memory, goal, how_hard.seed, draws, 1, trials / 10, result.bound, -1,
                                         result.trials, watch);
    if (repeated.actions.count > 0) {
      bool const shorter = take(repeated) < start.apart_length;
      improve_from(copy_of(repeated), trials / 10);
      trials = shorter ? 0 : trials / 10;
    }
  }
  if (trials > 0) improve_from(copy_of(start.apart), trials);
  result.stopped = watch.stopped();
  return finished(result, memory);
}

}  // namespace detail

/// The shortest of what is known at one limit (the catalogue's schedules, the zero-bubble paper's rule, list schedules and, where
/// memory is short, periodic orders), improved by local search. Never longer than the best of the catalogue that lives on this
/// placement and keeps the limit; mostly longer than what `find` finds, which comes up from smaller limits and tries for longer.
/// With 8 ranks and 32 microbatches a compiler does it in seconds, and finds what the running program finds.
///
/// \param how_hard `trials` of local search, 0: 1000. Where memory is short a tenth of them, after as many changes of a period,
/// or of each of two from 2000 trials on
/// \returns as `find`
template <placement_policy Placement>
constexpr found improve(Placement const& where, shape size, cost_view const& costs, activation_limit memory = {},
                        objective goal = objective::makespan, effort how_hard = {},
                        work_graph work = work_graph::split_backward) {
  return detail::search_on<found>(
      where, size, [&](plan const& placed) { return detail::improve(placed, costs, memory, goal, how_hard, work); });
}

}  // namespace chevron::search
