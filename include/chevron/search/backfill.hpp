#pragma once

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/search/effort.hpp>
#include <chevron/search/held.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/replay.hpp>

/// \file
/// Gaps of an order, filled with what comes later in it.

namespace chevron::search::detail {

/// Plays an order forwards or backwards in time. Where a rank would wait for its next action, it takes the first of those
/// behind that it can take without making that one wait longer, and without holding more than the limit then or at any place of
/// the order up to where the action taken stood. Backwards, what is taken early comes late. (Passes in turn both ways are Li and
/// Willis' way to improve schedules: European Journal of Operational Research 56(3), 1992.)
class backfill {
 public:
  constexpr backfill(replay& played, activation_limit memory)
      : played_(played),
        memory_(memory),
        kinds_(played.whole ? 2 : 3),
        all_(played.stages * played.micro_batches),
        given_(played.total),
        made_(played.total),
        at_(3 * all_),
        held_at_(played.total),
        end_(3 * all_),
        in_row_(3 * all_),
        next_(3 * played.stages),
        kind_before_(3 * played.stages),
        stage_before_(3 * played.stages),
        rows_begin_(played.ranks + 1),
        rows_(3 * played.stages),
        reached_(played.ranks),
        filled_(played.ranks),
        free_(played.ranks),
        wakes_(played.ranks),
        held_(played.ranks) {
    int filled = 0;
    for (int r = 0; r < played.ranks; ++r) {
      rows_begin_.data[r] = filled;
      for (int row = 0; row < kinds_ * played.stages; ++row) {
        if (played.rank_of.data[row] == r) rows_.data[filled++] = row;
      }
    }
    rows_begin_.data[played.ranks] = filled;
  }

  /// Changes the order that was given; false, and nothing changed, if it gets stuck.
  constexpr bool pass(bool backwards) {
    backwards_ = backwards;
    begin();
    for (int left = played_.total; left > 0;) {
      int rank = 0;
      double now = never;
      for (int r = 0; r < played_.ranks; ++r) {
        if (wakes_.data[r] < now) now = wakes_.data[rank = r];
      }
      if (now >= never) return false;
      int const taken = choose(rank, now);
      if (taken < 0) continue;
      take(rank, taken, now);
      --left;
    }
    for (int r = 0; r < played_.ranks; ++r) {
      int const first = played_.begin.data[r];
      int const last = played_.begin.data[r + 1] - 1;
      for (int i = first; i <= last; ++i) played_.order.data[i] = made_.data[backwards_ ? first + last - i : i];
    }
    return true;
  }

 private:
  static constexpr double never = 1e300;

  constexpr void begin() {
    for (int a = 0; a < 3 * all_; ++a) end_.data[a] = never;
    for (int row = 0; row < 3 * played_.stages; ++row) {
      next_.data[row] = 0;
      bool const follows = backwards_ ? row < (kinds_ - 1) * played_.stages : row >= played_.stages;
      kind_before_.data[row] = !follows ? 0 : backwards_ ? all_ : -all_;
      stage_before_.data[row] = backwards_ ? played_.feeds.data[row] : played_.fed_by.data[row];
    }
    for (int r = 0; r < played_.ranks; ++r) {
      int const first = played_.begin.data[r];
      int const last = played_.begin.data[r + 1] - 1;
      double held = 0;
      for (int i = first; i <= last; ++i) {
        int const a = played_.order.data[backwards_ ? first + last - i : i];
        given_.data[i] = a;
        at_.data[a] = i;
        int const row = played_.row_of.data[a];
        in_row_.data[row * played_.micro_batches + next_.data[row]++] = a;
        held += change_of(row);
        held_at_.data[i] = held;
      }
      reached_.data[r] = filled_.data[r] = first;
      free_.data[r] = wakes_.data[r] = held_.data[r] = 0;
      if (first > last) wakes_.data[r] = never;
    }
    for (int row = 0; row < 3 * played_.stages; ++row) next_.data[row] = 0;
  }

  constexpr double change_of(int row) const {
    double const change = played_.change_of(row, memory_);
    return backwards_ ? -change : change;
  }
  constexpr double lasts(int a) const {
    int const time = played_.time_of.data[a];
    return played_.lasts.data[time] + played_.post.data[time];
  }

  /// When all that an action needs is there; `never` while that is not known.
  constexpr double ready(int row, int a) const {
    int const own = kind_before_.data[row];
    double there = own != 0 ? end_.data[a + own] : 0;
    if (int const step = stage_before_.data[row]; step != 0 && there < never) {
      double const sent = end_.data[a + step] + played_.lag.data[played_.time_of.data[backwards_ ? a + step : a]];
      there = sent > there ? sent : there;
    }
    return there;
  }

  /// What a rank does now, or -1: then it sleeps until that may be different.
  constexpr int choose(int rank, double now) {
    int const stop = played_.begin.data[rank + 1];
    int& reached = reached_.data[rank];
    while (reached < stop && end_.data[given_.data[reached]] < never) ++reached;
    if (reached == stop) {
      wakes_.data[rank] = never;
      return -1;
    }
    int const due = given_.data[reached];
    double const waits_until = ready(played_.row_of.data[due], due);
    if (waits_until <= now) return due;
    double sooner = waits_until;
    int best = -1;
    for (int i = rows_begin_.data[rank]; i < rows_begin_.data[rank + 1]; ++i) {
      int const row = rows_.data[i];
      int const m = next_.data[row];
      if (m >= played_.micro_batches) continue;
      int const a = in_row_.data[row * played_.micro_batches + m];
      double const there = ready(row, a);
      if (there > now) {
        sooner = there < sooner ? there : sooner;
      } else if (now + lasts(a) <= waits_until && (best < 0 || at_.data[a] < at_.data[best]) && fits(rank, row, a)) {
        best = a;
      }
    }
    if (best < 0) wakes_.data[rank] = sooner;
    return best;
  }
  constexpr bool fits(int rank, int row, int a) const {
    double const change = change_of(row);
    if (change <= 0 || !(memory_.most > 0)) return true;
    double const limit = memory_.most + activation_limit::rounding - change;
    if (held_.data[rank] > limit) return false;
    for (int i = reached_.data[rank]; i < at_.data[a]; ++i) {
      if (held_at_.data[i] > limit) return false;
    }
    return true;
  }
  constexpr void take(int rank, int a, double now) {
    int const row = played_.row_of.data[a];
    double const change = change_of(row);
    for (int i = reached_.data[rank]; i < at_.data[a]; ++i) held_at_.data[i] += change;
    held_.data[rank] += change;
    ++next_.data[row];
    made_.data[filled_.data[rank]++] = a;
    end_.data[a] = now + played_.lasts.data[played_.time_of.data[a]];
    wakes_.data[rank] = free_.data[rank] = now + lasts(a);
    int const step = backwards_ ? played_.fed_by.data[row] : played_.feeds.data[row];
    if (step == 0) return;
    int const other = played_.rank_of.data[played_.row_of.data[a + step]];
    if (other == rank) return;
    double const there = end_.data[a] + played_.lag.data[played_.time_of.data[backwards_ ? a : a + step]];
    double const wakes = there > free_.data[other] ? there : free_.data[other];
    if (wakes < wakes_.data[other]) wakes_.data[other] = wakes;
  }

  replay& played_;
  activation_limit memory_;
  int kinds_;
  int all_;
  bool backwards_ = false;
  buffer<int> given_;  // the order, in the direction of time
  buffer<int> made_;
  buffer<int> at_;          // by number: where in the order it was given
  buffer<double> held_at_;  // by place in the order: what is held after it, with what was taken early
  buffer<double> end_;
  buffer<int> in_row_;        // by row: its actions as they were given, which need not be in the order of microbatches
  buffer<int> next_;          // by row: how many of them were taken
  buffer<int> kind_before_;   // by row, in the direction of time: the step to what an action needs of its own stage, or 0
  buffer<int> stage_before_;  // the same, of another stage
  buffer<int> rows_begin_;
  buffer<int> rows_;
  buffer<int> reached_;  // by rank: the first place that was not taken
  buffer<int> filled_;
  buffer<double> free_;
  buffer<double> wakes_;
  buffer<double> held_;
};

/// Passes both ways through an order; keeps the shortest. The order must be lawful.
constexpr void fill_gaps(plan& order, double& length, cost_view const& costs, activation_limit memory, objective goal,
                         double bound, watched& watch) {
  replay played(order, costs, goal);
  backfill filling(played, memory);
  plan made = copy_of(order);
  for (int pass = 0; pass < 4 && length > bound * (1 + 1e-12) && !watch.stop(); ++pass) {
    if (!filling.pass(pass % 2 != 0) || !played.play()) return;
    played.write_to(made);
    // A replay takes every wire to be free.
    double const made_length = costs.occupies_wire() ? length_of(goal, made, costs) : played.length();
    if (made_length >= length) continue;
    length = made_length;
    for (int i = 0; i < played.total; ++i) order.actions.data[i] = made.actions.data[i];
  }
}

/// Costs of messages that take several times as long. Where two ranks wait for each other's messages in turn, an action that is
/// taken earlier gains nothing, for the next one waits just as long; slower messages lead to orders in which such ranks have
/// a microbatch more in hand.
class slower_messages {
 public:
  constexpr slower_messages(int stages, cost_view const& costs, double times) : late_(stages), costs_(costs) {
    for (int s = 0; s < stages; ++s) {
      late_.data[s] = s + 1 < stages ? costs.of_message(s) + (times - 1) * costs.of_delay(s) : 0;
      any_ = any_ || late_.data[s] > 0;
    }
  }
  constexpr bool any() const { return any_; }
  constexpr cost_view view() const {
    cost_view out = costs_;
    out.communication = late_.data;
    out.communication_stride = 1;
    return out;
  }

 private:
  buffer<double> late_;
  cost_view costs_;
  bool any_ = false;
};

/// The same, also as if messages took twice and three times as long, and then as they are. Very many actions are filled anew only
/// once, and where they are near the bound.
constexpr void fill_gaps_by_slower_messages(plan& order, double& length, cost_view const& costs, activation_limit memory,
                                            objective goal, double bound, watched& watch) {
  plan const start = copy_of(order);
  fill_gaps(order, length, costs, memory, goal, bound, watch);
  bool const many = order.actions.count > 500'000;
  if (many && length > 1.05 * bound) return;
  for (double const times : {2., 3.}) {
    if (many && times < 3) continue;
    slower_messages const late(order.stages, costs, times);
    if (!late.any() || length <= bound * (1 + 1e-12) || watch.stop()) return;
    plan made = copy_of(start);
    double made_length = length_of(goal, made, late.view());
    fill_gaps(made, made_length, late.view(), memory, goal, 0, watch);
    made_length = length_of(goal, made, costs);
    fill_gaps(made, made_length, costs, memory, goal, bound, watch);
    if (made_length >= length) continue;
    length = made_length;
    order = static_cast<plan&&>(made);
  }
}

}  // namespace chevron::search::detail
