#pragma once

#include <chevron/describe/sized.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/dispatch.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/replay.hpp>

/// \file
/// Fills the waits of ranks in an order with actions from later places of the order.

namespace chevron::search::detail {

/// Simulates an order forwards or backwards in time. Where a rank would wait for its next action, it runs a later action of its
/// list instead: the first one that does not lengthen the next action's wait and that keeps the limit at every place of the
/// list before the action's old place. In a backward pass, such actions move to later times. (Passes in both directions in turn
/// are Li and Willis' way to improve schedules: European Journal of Operational Research 56(3), 1992.)
class backfill {
 public:
  constexpr backfill(replay& played, activation_limit memory)
      : played_(played),
        memory_(memory),
        given_(played.total),
        made_(played.total),
        at_(played.total),
        held_at_(played.total),
        in_row_(played.total),
        by_rank_(played.ranks, played.count, played.rank_of.data),
        come_(played.ranks) {}

  /// Fills waits in one pass over the order. \returns false, and changes nothing, if ranks wait for each other for ever
  constexpr bool pass(bool backwards) {
    backwards_ = backwards;
    buffer<int> seen(played_.count, zeroed);  // by row: number of its actions found so far
    for (int r = 0; r < played_.ranks; ++r) {
      int const first = played_.begin.data[r];
      int const last = played_.begin.data[r + 1] - 1;
      double held = 0;
      for (int i = first; i <= last; ++i) {
        int const a = played_.order.data[backwards ? first + last - i : i];
        int const row = played_.row_of.data[a];
        given_.data[i] = a;
        at_.data[a] = i;
        in_row_.data[number_at(row, seen.data[row]++)] = a;
        held_at_.data[i] = held += change_of(row);
      }
      come_.data[r] = {first, first, 0};
    }
    if (!chevron::detail::dispatch(played_, *this, backwards)) return false;
    for (int r = 0; r < played_.ranks; ++r) {
      int const first = played_.begin.data[r];
      int const last = played_.begin.data[r + 1] - 1;
      for (int i = first; i <= last; ++i) played_.order.data[i] = made_.data[backwards ? first + last - i : i];
    }
    return true;
  }

  /// This class is a policy of `dispatch`, which calls the following members.
  constexpr int number(int row, int k) const { return in_row_.data[number_at(row, k)]; }
  constexpr int take(int rank, double now, double const* ready, int const* taken, double& until) {
    int const row = choose(rank, now, ready, taken, until);
    if (row == chevron::detail::sleeps) return row;
    progress& come = come_.data[rank];
    int const a = number(row, taken[row]);
    int const place = at_.data[a];
    double const change = change_of(row);
    for (int i = come.reached; i < place; ++i) held_at_.data[i] += change;
    come.held += change;
    made_.data[come.filled++] = a;
    given_.data[place] = was_taken;
    return row;
  }

  constexpr double free_again(int number, double now, double) const { return now + busy(number); }

 private:
  constexpr int choose(int rank, double now, double const* ready, int const* taken, double& until) {
    int const stop = played_.begin.data[rank + 1];
    int& reached = come_.data[rank].reached;
    while (reached < stop && given_.data[reached] == was_taken) ++reached;
    if (reached == stop) return chevron::detail::sleeps;
    int const due = played_.row_of.data[given_.data[reached]];
    double const waits_until = until = ready[due];
    if (waits_until <= now) return due;
    int best = chevron::detail::sleeps;
    int best_place = stop;
    for (int i = by_rank_.first.data[rank]; i < by_rank_.first.data[rank + 1]; ++i) {
      int const row = by_rank_.stage.data[i];
      double const there = ready[row];
      if (there > now) {
        until = there < until ? there : until;
        continue;
      }
      int const a = number(row, taken[row]);
      if (now + busy(a) > waits_until || at_.data[a] >= best_place || !fits(rank, row, at_.data[a])) continue;
      best = row;
      best_place = at_.data[a];
    }
    return best;
  }

  static constexpr int was_taken = -1;
  struct progress {
    int reached;  // the first place of the rank's list whose action has not run
    int filled;
    double held;
  };

  constexpr int number_at(int row, int k) const { return row * played_.micro_batches + k; }
  /// The time for which an action keeps its rank busy.
  constexpr double busy(int number) const {
    int const time = played_.time_of.data[number];
    return played_.lasts.data[time] + played_.post.data[time];
  }
  constexpr double change_of(int row) const {
    double const change = played_.change_of(row, memory_);
    return backwards_ ? -change : change;
  }
  constexpr bool fits(int rank, int row, int place) const {
    double const change = change_of(row);
    if (change <= 0 || !(memory_.most > 0)) return true;
    double const limit = memory_.most + activation_limit::rounding - change;
    if (come_.data[rank].held > limit) return false;
    for (int i = come_.data[rank].reached; i < place; ++i) {
      if (held_at_.data[i] > limit) return false;
    }
    return true;
  }

  replay& played_;
  activation_limit memory_;
  bool backwards_ = false;
  buffer<int> given_;  // the given order; backwards in a backward pass
  buffer<int> made_;
  buffer<int> at_;          // by action number: index in `given_`
  buffer<double> held_at_;  // by place in the order: memory after that action, with actions already run early
  buffer<int> in_row_;      // by row: its actions in the given order, which need not be the order of microbatches
  chevron::detail::stages_by_rank by_rank_;  // the rows (not stages) of each rank
  buffer<progress> come_;
};

/// Fills waits in both directions, and replaces `order` and `length` by the shortest order's. The order must be lawful.
constexpr void fill_gaps(plan& order, double& length, problem const& asked, double bound, watched& watch) {
  replay played(order, asked.costs, asked.goal);
  backfill filling(played, asked.memory);
  plan made = copy_of(order);
  for (int pass = 0; pass < 4 && length > bound * (1 + 1e-12) && !watch.stop(); ++pass) {
    if (!filling.pass(pass % 2 != 0) || !played.play()) return;
    played.write_to(made);
    // A replay assumes that every wire is free.
    double const made_length = asked.costs.occupies_wire() ? length_of(asked.goal, made, asked.costs) : played.length();
    if (made_length >= length) continue;
    length = made_length;
    for (int i = 0; i < played.total; ++i) order.actions.data[i] = made.actions.data[i];
  }
}

/// Calls `fill_gaps`, and again as if messages took twice and three times as long. Where two ranks wait for each other's
/// messages in turn, to run one action earlier gains nothing, since the next one waits just as long; slower messages lead to
/// orders in which such ranks have one more microbatch ready. For more than 500,000 actions, messages are slowed only by three,
/// and only if the length is within 5 % of the bound.
constexpr void fill_gaps_by_slower_messages(plan& order, double& length, problem const& asked, double bound, watched& watch) {
  plan const start = copy_of(order);
  fill_gaps(order, length, asked, bound, watch);
  bool late = false;
  for (int s = 0; s + 1 < order.stages; ++s) late = late || asked.costs.of_delay(s) > 0;
  bool const many = order.actions.count > 500'000;
  if (many && length > 1.05 * bound) return;
  for (double const times : {2., 3.}) {
    if (many && times < 3) continue;
    if (!late || length <= bound * (1 + 1e-12) || watch.stop()) return;
    owned_costs const slower = with_slower_messages(asked.costs, order.stages, times);
    problem const slowed = asked.at(slower.view());
    plan made = copy_of(start);
    double made_length = length_of(asked.goal, made, slowed.costs);
    fill_gaps(made, made_length, slowed, 0, watch);
    made_length = length_of(asked.goal, made, asked.costs);
    fill_gaps(made, made_length, asked, bound, watch);
    if (made_length >= length) continue;
    length = made_length;
    order = static_cast<plan&&>(made);
  }
}

}  // namespace chevron::search::detail
