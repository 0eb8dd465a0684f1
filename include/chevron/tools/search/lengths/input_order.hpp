#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/lengths/replan.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/random.hpp>

/// \file
/// Searches for the order in which microbatches of unequal length enter the pipeline.

namespace chevron::search {

/// The order of microbatches that was found, and the schedule found for it.
struct order_found : found {
  std::vector<int> order;  ///< `order[k]`: index of the given microbatch that enters k-th
  length_factors lengths;  ///< the microbatches' factors in that order
  double as_given = 0;     ///< length of the schedule found for the given order: never below `length`
};

namespace detail {

/// Puts the shortest microbatches at both ends and the longest in the middle.
inline std::vector<int> longest_in_the_middle(std::vector<int> const& ascending) {
  std::vector<int> out(ascending.size());
  for (std::size_t i = 0; i < ascending.size(); ++i) out[i % 2 == 0 ? i / 2 : ascending.size() - 1 - i / 2] = ascending[i];
  return out;
}

/// The same problem with other lengths of microbatches. `lengths` must outlive the result.
inline problem with_lengths(problem const& asked, length_factors const& lengths) {
  problem out = asked;
  out.costs.lengths = lengths.view();
  return out;
}

/// Exchanges places of microbatches, with all their slices, in `order`, while the plan remains unchanged; an exchange that does
/// not lengthen the plan is kept.
inline void exchange_places(plan_view const& plan, problem const& asked, int trials, random_numbers& random, watched& watch,
                            std::vector<int>& order) {
  int const count = static_cast<int>(order.size());
  if (count < 2) return;
  auto const slices = static_cast<std::size_t>(plan.size.slices);
  length_factors now = factors_of(asked.costs.lengths, plan.size.units()).in(order, plan.size.slices);
  cost_view seen = asked.costs;
  seen.lengths = now.view();
  double length = length_of(asked.goal, plan, seen);
  for (int trial = 0; trial < trials && !watch.stop(); ++trial) {
    auto const a = static_cast<std::size_t>(random.below(count));
    auto const b = static_cast<std::size_t>(random.below(count));
    auto const exchange = [&] {
      std::swap(order[a], order[b]);
      for (std::size_t s = 0; s < slices; ++s) {
        std::swap(now.computation[a * slices + s], now.computation[b * slices + s]);
        std::swap(now.transfer[a * slices + s], now.transfer[b * slices + s]);
      }
    };
    exchange();
    double const then = length_of(asked.goal, plan, seen);
    if (then > length) {
      exchange();
    } else {
      length = then;
    }
  }
}

}  // namespace detail

/// Searches, from a known schedule, for the order in which microbatches of unequal length should enter the pipeline, and for a
/// schedule of that order. Takes milliseconds. The slices of a microbatch remain together, in their order. A step's gradients
/// are summed in the new order, so their last bits may differ from those of another order.
///
/// Tries the given order, shortest first, longest in the middle and longest first. In the shortest of these schedules it
/// exchanges microbatches where that does not lengthen the schedule, and calls `replan` for the resulting order.
///
/// \param asked the problem for `replan`; its costs have the length factors of the microbatches in the given order
/// \param how_hard the effort of `replan` for each order that is tried
/// \returns a schedule never longer than `replan`'s for the given order; the caller puts the microbatches into `order`
inline order_found reorder(plan_view const& known, problem const& asked, effort how_hard = {}) {
  length_factors const given = factors_of(asked.costs.lengths, known.size.units());
  int const slices = known.size.slices;
  std::vector<int> as_given(static_cast<std::size_t>(known.size.micro_batches));
  std::iota(as_given.begin(), as_given.end(), 0);
  auto const look = [&](std::vector<int> const& order, plan_view const& from) {
    order_found one{{}, order, given.in(order, slices)};
    static_cast<found&>(one) = replan(from, detail::with_lengths(asked, one.lengths), how_hard);
    return one;
  };
  order_found best = look(as_given, known);
  best.as_given = best.length;
  if (best.best.problem || asked.costs.lengths.alike()) return best;
  auto const take = [&](order_found next) {
    if (next.best.problem || next.length >= best.length) return false;
    next.as_given = best.as_given;
    next.trials += best.trials;
    best = std::move(next);
    return true;
  };
  std::vector<int> ascending = as_given;
  auto const time_of = [&](int m) {
    auto const first = given.computation.begin() + std::ptrdiff_t{m} * slices;
    return std::accumulate(first, first + slices, 0.0);
  };
  // Microbatches of equal length stay in the order of their numbers. (Not std::stable_sort, of which clang 19 warns in the
  // headers of GCC 12.)
  std::sort(ascending.begin(), ascending.end(), [&](int a, int b) {
    double const first = time_of(a), second = time_of(b);
    return first != second ? first < second : a < b;
  });
  std::vector<int> const descending(ascending.rbegin(), ascending.rend());
  detail::watched watch(how_hard.watch);
  for (auto const& order : {ascending, detail::longest_in_the_middle(ascending), descending}) {
    if (watch.stop()) break;
    take(look(order, known));
  }
  detail::random_numbers random(how_hard.seed);
  for (int round = 0; round < 8 && !watch.stop(); ++round) {
    std::vector<int> order = best.order;
    detail::exchange_places(best.best, asked, 20 * known.size.micro_batches, random, watch, order);
    if (order == best.order || !take(look(order, copy_of(best.best)))) break;
  }
  best.stopped = watch.stopped();
  return best;
}

/// Calls `find` for the given order, then `reorder` with its schedule, then `find` for the new order. The result is never
/// longer than the result of `find` for the given order, whose length is `as_given`.
/// \param asked the problem; its costs have the length factors of the microbatches in the given order
/// \returns a schedule, and the order into which the caller puts the microbatches
inline order_found find_order(problem const& asked, effort how_hard = {}) {
  order_found first{find(asked, how_hard), {}, {}};
  if (first.best.problem) return first;
  order_found out = reorder(first.best, asked, {0, how_hard.seed, how_hard.watch});
  out.as_given = first.length;
  found last = find(detail::with_lengths(asked, out.lengths), how_hard);
  std::int64_t const trials = first.trials + out.trials + last.trials;
  double const proved = std::max(out.bound, last.bound);  // `out` and `last` have bounds for the same order
  out.published = last.published;
  out.published_length = last.published_length;
  if (last.length < out.length) static_cast<found&>(out) = std::move(last);
  out.bound = proved;
  out.trials = trials;
  return out;
}

}  // namespace chevron::search
