#pragma once

#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/search/anneal.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/start.hpp>

/// \file
/// Changes a plan between two steps, in milliseconds, to fit costs that have changed.

namespace chevron::search {

/// Improves a lawful plan for other costs: fills its waits, then applies local search. Stages remain on their ranks, and
/// gradients are summed in the known plan's order. Under the new costs the result is never longer than the known plan. Takes a
/// hundredth of `find`'s time, and is mostly within a percent of `find`'s length if the memory limit is the known plan's peak.
///
/// \param known a lawful plan within the limit, such as the one that runs
/// \param asked the costs, limit and objective; its `where` and `work` are ignored, since `known` has both
/// \param how_hard `trials` of local search, 0: 1000
/// \returns a plan, bound and lengths, like `find`, without `published`; if `known` is not lawful or breaks the limit,
/// `best.problem` says so
constexpr found replan(plan_view const& known, problem asked, effort how_hard = {}) {
  found result;
  bool const split = known.holds(kind::backward_weight);
  asked.work = split ? work_graph::split_backward : work_graph::full_backward;
  asked.where = known;
  detail::starting_point start(asked);
  finding f = known.problem ? known.problem : check(known);
  using chevron::detail::fault;
  if (known.holds(kind::recompute) || known.has_own_kinds())
    f = fault(
        law::description,
        "a search moves F, B, I and W: begin with a plan without R and own actions (place_recomputation adds R's); stages: ",
        known.stages);
  if (!f && !start.consider(copy_of(known), known.name))
    f = fault(law::description,
              "a plan to begin with must train and keep the memory limit, in whole chunks: ", asked.memory.chunks());
  if (f) return detail::refused(asked, f);
  result.bound = detail::bound_of(asked, asked.memory);
  if (split && detail::in_line(known)) {
    detail::starting_point rule(asked);
    detail::add_zero_bubble(rule, asked);
    if (rule.exists() && same_gradient_order(rule.apart, start.apart)) start.consider(rule.shortest, rule.shortest.name);
  }
  result.start = start.shortest.name;
  result.length = start.shortest_length;
  result.best = copy_of(start.shortest);
  if (result.optimal()) return detail::finished(result, asked.memory);

  detail::watched watch(how_hard.watch);
  watch.now.bound = result.bound;
  watch.now.length = result.length;
  plan made = copy_of(start.apart);
  double length = start.apart_length;
  detail::fill_gaps(made, length, asked, result.bound, watch);
  detail::annealing search(made, asked, how_hard.seed);
  result.trials = search.run(how_hard.trials > 0 ? how_hard.trials : 1000, result.bound, watch);
  plan searched = copy_of(made);
  search.write_best(searched);
  // Lengths come from a simulation, since local search assumes that every wire is free.
  for (plan const* one : {&made, &searched}) {
    double const played = start.length_of(*one);
    if (played >= result.length) continue;
    result.length = played;
    result.best = copy_of(*one);
  }
  result.stopped = watch.stopped();
  return detail::finished(result, asked.memory);
}

}  // namespace chevron::search
