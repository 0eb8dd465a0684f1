#pragma once

#include <cstdint>
#include <utility>

#include <chevron/describe/sized.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/start.hpp>

/// \file
/// Results of searches, and the findings for searches without a result.

namespace chevron::search {

/// The result of a search; results with more members derive from this one.
struct found {
  plan best;          ///< a plan that passes `check`; otherwise `best.problem` says why no plan was found
  double length = 0;  ///< of `best`, in the costs' unit
  double bound = 0;   ///< no schedule on this placement is shorter; with unequal microbatches, none in the given order
  plan_name start;    ///< the name of the order from which the search made `best`
  plan published;     ///< the catalogue's shortest schedule within the limit; only if `published_length` is not 0
  double published_length = 0;  ///< the length of `published`, in the costs' unit; 0: none
  std::int64_t trials = 0;      ///< number of changes tried
  bool stopped = false;         ///< the watcher ended the search

  /// Whether the best plan is proved to be the shortest.
  constexpr bool optimal() const { return !best.problem && length <= bound * (1 + 1e-12); }

  /// Whether a further round (`in_rounds`) is of no use: there is a problem, the best plan is optimal, or the watcher stopped
  /// the search.
  bool settled() const { return best.problem || optimal() || stopped; }
  double shortest() const { return length; }
  /// Merges the result of a further round, `next`: keeps the shorter plan and the higher bound, and sums the trials.
  void add(found&& next) {
    std::int64_t const all = trials + next.trials;
    bool const ended = next.stopped;
    double const proved = next.bound > bound ? next.bound : bound;
    if (!next.best.problem && next.length < length * (1 - 1e-12)) *this = std::move(next);
    bound = proved;
    trials = all;
    stopped = ended;
  }
};

namespace detail {

/// The result for a problem that is refused: a plan without actions whose `problem` is `f`.
constexpr found refused(problem const& asked, finding const& f) {
  found nothing;
  nothing.best = chevron::detail::refused(asked.where.size, "searched", f);
  return nothing;
}

/// A lower bound, by the problem's objective, of the length of every plan within a limit.
constexpr double bound_of(problem const& asked, activation_limit const& memory) {
  owned_costs whole;
  if (!asked.split()) whole = unsplit(asked.costs, asked.where.stages);
  lower_bounds const least = bounds(asked.where, asked.split() ? asked.costs : whole.view(), memory);
  return asked.goal == objective::makespan ? least.makespan : least.span;
}

/// Sets the name of a result's plan, and its limit of chunks in flight.
constexpr found finished(found& result, activation_limit memory) {
  finish(result.best, memory);
  return static_cast<found&&>(result);
}

/// Refuses a problem without stages, a limit below the chunks of one microbatch, and a share kept for W that is 0 or less or
/// above 1.
constexpr finding refusal(problem const& asked) {
  plan const& placed = asked.where;
  activation_limit const& memory = asked.memory;
  if (placed.problem) return placed.problem;
  auto const fault = [](char const* words, int number) { return chevron::detail::fault(law::description, words, number); };
  if (placed.stages < 1)
    return fault("a search needs the rank of each stage, such as .where = placed_on(placement::linear, size); stages: ", 0);
  int const least = least_in_flight(placed);
  if (memory.most > 0 && memory.chunks() < least)
    return fault("a microbatch on its way holds a chunk with each stage of a rank: the memory limit must be at least ", least);
  if (!(memory.kept_for_weight > 0) || memory.kept_for_weight > 1)
    return fault("the share of a microbatch that a chunk keeps for its W must be above 0 and at most 1; stages: ", placed.stages);
  return {};
}

/// The finding of a search without a result: no order keeps the limit, or a watcher ended the search before it found one.
constexpr finding nothing_found(problem const& asked, bool stopped) {
  return chevron::detail::fault(law::description,
                                stopped
                                    ? "the search was ended before an order was found that keeps the memory limit; microbatches: "
                                    : "no order was found that keeps the memory limit; microbatches: ",
                                asked.where.size.units());
}

}  // namespace detail

}  // namespace chevron::search
