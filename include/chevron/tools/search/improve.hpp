#pragma once

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/tools/search/anneal.hpp>
#include <chevron/tools/search/found.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/start.hpp>
#include <chevron/tools/search/steady.hpp>

/// \file
/// A search small enough for a compiler: improves known schedules at one memory limit.

namespace chevron::search {

namespace detail {

/// Whether a schedule puts every stage on the same rank as `placed`.
template <class Schedule>
constexpr bool lives_on(plan const& placed, Schedule const& one) {
  if (stages_of(one, placed.size) != placed.stages) return false;
  for (int s = 0; s < placed.stages; ++s) {
    if (one.where.rank_of(s, placed.size) != placed.rank_of.data[s]) return false;
  }
  return true;
}

}  // namespace detail

/// The shortest of the schedules known at one limit (the catalogue's schedules, the zero-bubble paper's rule, list schedules
/// and, where memory is short, periodic orders), improved by local search. The result is never longer than the catalogue's best
/// schedule on this placement within the limit. It is mostly longer than the result of `find`, which starts from smaller limits
/// and makes more trials. With 8 ranks and 32 microbatches a compiler takes seconds, and finds the same schedule as a search at
/// run time.
///
/// \param how_hard `trials` of local search, 0: 1000. If memory is short, only a tenth of them for each part of the search: for
/// a period (from 2000 trials on, for each of two), for the best order of these periods and, unless that order is the shorter
/// one, for the best known order
/// \returns a plan, bounds and lengths, like `find`
constexpr found improve(problem const& asked, effort how_hard = {}) {
  using namespace detail;
  if (finding const f = refusal(asked)) return refused(asked, f);
  plan const& placed = asked.where;
  bool const split = asked.split();
  found result;
  result.bound = bound_of(asked, asked.memory);

  // Schedules of other placements are not expanded: in a compiler that costs as much as hundreds of trials.
  starting_point start(asked);
  for_each_start(placed.size, [&](auto const& one) {
    if (lives_on(placed, one)) start.consider(to_begin_with(expand(one, placed.size), asked.costs), one.name);
  });
  bool const straight = in_line(placed);
  if (straight) {
    for_each_with_slack(asked, [&](plan const& made) { start.consider(made, made.name); });
  }
  if (start.exists()) {
    result.published = copy_of(start.shortest);
    result.published_length = start.shortest_length;
  }
  bool const reached = start.exists() && start.shortest_length <= result.bound * (1 + 1e-12);
  if (!reached) {
    add_list_schedules(start, asked);
    if (straight && split) add_zero_bubble(start, asked);
  }
  if (!start.exists()) {
    result.best = chevron::detail::refused(placed.size, "searched", nothing_found(asked, false));
    return result;
  }
  result.start = start.shortest.name;
  result.length = start.shortest_length;
  result.best = copy_of(start.shortest);
  if (result.optimal()) return finished(result, asked.memory);

  watched watch(how_hard.watch);
  watch.now.bound = result.bound;
  watch.now.length = result.length;
  // Lengths come from a simulation, since local search and the filling of gaps assume that every wire is free.
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
    annealing search(made, asked, how_hard.seed);
    result.trials += search.run(trials, result.bound, watch);
    search.write_best(made);
    take(made);
  };
  int trials = how_hard.trials > 0 ? how_hard.trials : 1000;
  // With more memory this number of trials finds no shorter periodic orders.
  if (asked.memory.most > 0 && asked.memory.most < placed.stages) {
    int const draws = trials < 2000 ? 1 : 2;
    periodic_effort const periods{how_hard.seed, draws, 1, trials / 10, result.bound, -1};
    plan const repeated = periodic_start(start.apart, asked, periods, result.trials, watch);
    if (repeated.actions.count > 0) {
      bool const shorter = take(repeated) < start.apart_length;
      improve_from(copy_of(repeated), trials / 10);
      trials = shorter ? 0 : trials / 10;
    }
  }
  if (trials > 0) improve_from(copy_of(start.apart), trials);
  result.stopped = watch.stopped();
  return finished(result, asked.memory);
}

}  // namespace chevron::search
