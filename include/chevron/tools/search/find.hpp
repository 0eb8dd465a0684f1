#pragma once

#include <chevron/tools/search/found.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/rising.hpp>

/// \file
/// Searches for a short schedule for given costs and memory, on any placement.

namespace chevron::search {

/// Searches for the shortest schedule of this shape on this placement. Local search improves, trial by trial, the best of the
/// catalogue's schedules, the zero-bubble paper's orders (with one stage a rank) and list schedules. So the result is never
/// longer than any schedule of the catalogue that has this placement and keeps the limit. For a small pipeline `refute` tries
/// all orders; if it finishes and no order is shorter, `found.optimal()` is true.
///
/// \param judge accepts, changes or refuses each order that keeps the limit; has the members of `detail::any_order`
/// \returns in `best` a plan that passes `check` and declares its limit of chunks in flight, for `lower(prove(found.best))`. If
/// no plan is found, `best.problem` says why; `find` throws nothing
template <class Judge = detail::any_order>
constexpr found find(problem const& asked, effort how_hard = {}, Judge const& judge = {}) {
  if (finding const f = detail::refusal(asked)) return detail::refused(asked, f);
  return detail::rising_search<Judge>(asked, how_hard, judge).run();
}

}  // namespace chevron::search
