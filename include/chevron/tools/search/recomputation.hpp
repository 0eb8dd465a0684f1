#pragma once

#include <cstdint>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/sizes.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Moves recomputation into the times at which ranks of a plan would wait.

namespace chevron::search {

namespace detail {

/// Moves the action at `from` of a list to before the action at `to`.
constexpr void move_up(action* list, int from, int to) {
  action const moved = list[from];
  for (int i = from; i > to; --i) list[i] = list[i - 1];
  list[to] = moved;
}

/// Moves R's of later chunks into the rank's first wait that is long enough for one of them.
/// \returns whether an R was moved
constexpr bool fill_waits(plan& made, cost_view const& costs, timeline const& when, int rank, size_view const& sizes,
                          std::int64_t most) {
  action* const list = made.actions.data;
  int const stop = made.begin.data[rank + 1];
  double free_from = 0;
  for (int i = made.begin.data[rank]; i < stop;) {
    int const last = last_of_pair(list, i, stop);
    double wait = when.start.data[i] - free_from;
    int place = i;
    for (int j = last + 1; j < stop && wait > 0; ++j) {
      if (list[j].kind != kind::recompute) continue;
      action const r = list[j];
      // The F of the same chunk must come before the wait.
      bool runs_before = true;
      for (int k = place; k < j; ++k) {
        runs_before =
            runs_before && !(makes_output(list[k].kind) && list[k].stage == r.stage && list[k].micro_batch == r.micro_batch);
      }
      double const takes = costs.of_action(r);
      if (!runs_before || takes > wait * (1 + 1e-12)) continue;
      move_up(list, j, place);
      if (most > 0 && peak_bytes(made, sizes, rank) > most) {
        for (int k = place; k < j; ++k) list[k] = list[k + 1];
        list[j] = r;
        break;
      }
      wait -= takes;
      ++place;
    }
    // The move changes times after it, so the next round computes them anew.
    if (place > i) return true;
    free_from = when.end.data[last];
    i = last + 1;
  }
  return false;
}

}  // namespace detail

/// Moves R's into the waits of their ranks, as far as memory allows: where a rank waits longer than an R takes, the rank runs
/// the R of a later chunk, and stores that chunk's activations from then on. No action begins later than before, so the step is
/// never longer. A round fills one wait of each rank and takes O(actions); the first of the shortest plans of all rounds is
/// returned. (Mario, Liu et al., PPoPP 2025, has the same aim and another search.)
/// \param of a lawful plan with R's, such as a plan of `with_recomputation`
/// \param sizes,most bytes of activations, and the limit of bytes on a rank; 0: no limit
/// \returns a plan that is not proved yet
constexpr plan place_recomputation(plan_view const& of, cost_view const& costs, size_view const& sizes = {},
                                   std::int64_t most = 0) {
  plan made = copy_of(of), best = copy_of(of);
  timeline when = simulate(made, costs);
  double shortest = makespan(made, when);
  constexpr int patience = 8;  // consecutive rounds without a shorter step after which the search ends
  bool moved = true;
  for (int idle = 0; moved && idle < patience; ++idle) {
    moved = false;
    for (int r = 0; r < of.size.ranks; ++r) moved = detail::fill_waits(made, costs, when, r, sizes, most) || moved;
    when = simulate(made, costs);
    if (double const length = makespan(made, when); length < shortest * (1 - 1e-12)) {
      shortest = length;
      best = copy_of(made);
      idle = -1;
    }
  }
  return best;
}

}  // namespace chevron::search
