#pragma once

#include <chevron/search/found.hpp>
#include <chevron/search/problem/effort.hpp>
#include <chevron/search/problem/problem.hpp>
#include <chevron/search/rising.hpp>

/// \file
/// A schedule made for given costs and memory, on any placement.

namespace chevron::search {

/// Looks for the shortest schedule of this shape on this placement: from the catalogue's schedules, the zero-bubble paper's
/// orders (with one stage a rank) and list schedules, the best is improved by local search, trial by trial. So the result is
/// never longer than the best of the catalogue that lives on this placement and keeps the limit. Of a small pipeline all orders
/// are looked through (`refute`); then nothing is shorter, and that is said: `found.optimal()`.
///
/// \param judge accepts orders among those that keep the limit, as `detail::any_order` does
/// \returns a plan that passes `check` and declares its limit of chunks in flight: `lower(prove(found.best))`. Where there is
/// none, `best.problem` says why; it does not throw
template <class Judge = detail::any_order>
constexpr found find(problem const& asked, effort how_hard = {}, Judge const& judge = {}) {
  if (finding const f = detail::refusal(asked)) return detail::refused(asked, f);
  return detail::rising_search<Judge>(asked, how_hard, judge).run();
}

}  // namespace chevron::search
