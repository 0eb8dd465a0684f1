#pragma once

#include <cstdint>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/problem/random.hpp>
#include <chevron/tools/search/replay.hpp>

/// \file
/// Local search: improves an order by moving actions of the step's critical path, one at a time.

namespace chevron::search::detail {

/// Simulated annealing of one order. A trial moves an action of a critical path to another place of its rank's list. A move
/// that makes the order longer is accepted if the difference is small; the accepted differences shrink towards the end of the
/// search. (Only moves of a critical path can shorten a step: van Laarhoven, Aarts and Lenstra, Operations Research 40(1),
/// 1992.) The whole order is simulated only if the longest path through the actions that the move touches is short enough to
/// accept the move. The initial order must be lawful, have no fused pairs, and keep the limit.
class annealing {
 public:
  constexpr annealing(plan_view const& start, problem const& asked, std::uint64_t seed)
      : played_(start, asked.costs, asked.goal),
        memory_(asked.memory),
        random_(seed),
        best_order_(start.total()),
        held_(start.total()),
        path_(start.total()),
        ends_(far + 1) {
    for (int r = 0; r < start.size.ranks; ++r) note(r, start.begin[r], start.begin[r + 1] - 1);
    played_.play();
    now_ = judge();
    played_.look_back();
    keep_best();
    for (int i = 0; i < played_.lasts.count; ++i) {
      double const one = played_.lasts.data[i] - played_.before.data[i];
      longest_action_ = one > longest_action_ ? one : longest_action_;
    }
    find_path();
  }

  /// Runs trials while the best order is longer than `bound` and the watcher does not stop them. \returns the number of trials
  constexpr int run(int trials, double bound, watched& watch) {
    double const hottest = longest_action_ * (played_.total < short_order ? temperature_if_short : temperature);
    for (int trial = 0; trial < trials; ++trial) {
      if (best_.length <= bound * (1 + 1e-12)) return trial;
      if (trial % watched::every == 0 && watch.stop()) return trial;
      try_one(hottest * (trials - trial) / trials);
    }
    return trials;
  }

  constexpr double best_length() const { return best_.length; }
  /// Writes the shortest order into a plan that has the same actions.
  constexpr void write_best(plan& made) const {
    for (int i = 0; i < played_.total; ++i) made.actions.data[i] = played_.action_of(best_order_.data[i]);
  }

 private:
  // Found by experiment, over placements, limits and costs: a higher temperature converges more slowly, a lower one ends in a
  // worse local minimum. Short orders get a higher one: they have fewer ways out of a local minimum, and enough trials.
  static constexpr int short_order = 150;
  static constexpr double temperature = 0.25;
  static constexpr double temperature_if_short = 1;
  static constexpr double weight_of_mean = 0.05;
  static constexpr int near = 4;
  static constexpr int far = 40;

  /// The score of an order: its length, plus a small part of the ranks' mean time, so that a move counts as progress before it
  /// shortens the length itself.
  struct merit {
    double length = 0;
    double energy = 0;
  };

  constexpr merit judge() const {
    merit out;
    double sum = 0;
    for (int r = 0; r < played_.ranks; ++r) {
      double const one = played_.length_of(r);
      out.length = one > out.length ? one : out.length;
      sum += one;
    }
    out.energy = out.length + weight_of_mean * sum / played_.ranks;
    return out;
  }
  /// Updates the places of actions at positions [from, to], and the memory that their rank holds after each of them.
  constexpr void note(int rank, int from, int to) {
    played_.note(from, to);
    double held = from > played_.begin.data[rank] ? held_.data[from - 1] : 0;
    for (int i = from; i <= to; ++i) {
      int const a = played_.order.data[i];
      held += played_.change_of(played_.row_of.data[a], memory_);
      held_.data[i] = held;
    }
  }
  constexpr bool fits(int rank, int from, int to) const {
    if (!(memory_.most > 0)) return true;
    double held = from > played_.begin.data[rank] ? held_.data[from - 1] : 0;
    for (int i = from; i <= to; ++i) {
      held += played_.change_of(played_.row_of.data[played_.order.data[i]], memory_);
      if (held > memory_.most + activation_limit::rounding) return false;
    }
    return true;
  }

  /// Finds a critical path: a chain of actions that determines the length of the longest rank. Chooses at random among several.
  constexpr void find_path() {
    double const same = longest_action_ * 1e-9;
    int at = -1;
    int equals = 0;
    double longest = -1;
    for (int r = 0; r < played_.ranks; ++r) {
      if (played_.begin.data[r] == played_.begin.data[r + 1]) continue;
      double const one = played_.length_of(r);
      if (one > longest + same) equals = 0;
      if (one < longest - same || (++equals > 1 && random_.below(equals) != 0)) continue;
      longest = one > longest ? one : longest;
      at = played_.begin.data[r + 1] - 1;
    }
    path_count_ = 0;
    while (at >= 0) {
      path_.data[path_count_++] = at;
      int const a = played_.order.data[at];
      int const row = played_.row_of.data[a];
      int const rank = played_.rank_of.data[row];
      bool const alone = at == played_.begin.data[rank];
      int cause = alone ? -1 : at - 1;
      int const step = played_.fed_by.data[row];
      if (step != 0 && played_.rank_of.data[played_.row_of.data[a + step]] != rank) {
        double const there = played_.finish.data[a + step] + played_.lag.data[played_.time_of.data[a]];
        double const later = there - (alone ? 0 : played_.free_after(played_.order.data[at - 1]));
        if (alone || later > same || (later > -same && random_.coin())) cause = played_.at.data[a + step];
      }
      at = cause;
    }
  }

  /// Moves the action at `from` to `to` in its rank's list, and the actions between by one place.
  constexpr void shift(int from, int to) {
    int* const order = played_.order.data;
    int const moved = order[from];
    int const step = to > from ? 1 : -1;
    for (int i = from; i != to; i += step) order[i] = order[i + step];
    order[to] = moved;
  }

  constexpr void try_one(double hot) {
    int const from = path_.data[random_.below(path_count_)];
    int const moved = played_.order.data[from];
    int const row = played_.row_of.data[moved];
    int const all = played_.stages * played_.micro_batches;
    int const rank = played_.rank_of.data[row];
    int const distance = random_.coin() ? 1 : 1 + random_.below(random_.below(4) != 0 ? near : far);
    int const to = random_.coin() ? from - distance : from + distance;
    if (to < played_.begin.data[rank] || to >= played_.begin.data[rank + 1]) return;
    // Actions of one stage and kind remain in the order of microbatches, and F, I and W of one microbatch and stage in their
    // order; a move may pass all other actions.
    for (int i = from < to ? from + 1 : to; i < (from < to ? to + 1 : from); ++i) {
      int const other = played_.order.data[i];
      int const apart = other < moved ? moved - other : other - moved;
      if (played_.row_of.data[other] == row || apart == all || apart == 2 * all) return;
    }
    int const low = from < to ? from : to;
    int const high = from < to ? to : from;
    shift(from, to);
    if (fits(rank, low, high)) {
      double const chance = random_.share();
      double const allowed = hot * 3 * chance * chance;
      if (played_.longest_through(rank, low, high, ends_.data) <= now_.length + allowed + longest_action_ * 0.01) {
        note(rank, low, high);
        bool const complete = played_.resequence(from, to);
        if (complete) {
          played_.replay_from(low, high);
          merit const then = judge();
          if (then.energy <= now_.energy + allowed) {
            now_ = then;
            played_.look_back_from(low, high);
            find_path();
            if (now_.length < best_.length) keep_best();
            return;
          }
        }
        shift(to, from);
        note(rank, low, high);
        if (complete) played_.play();
        return;
      }
    }
    shift(to, from);
  }

  constexpr void keep_best() {
    best_ = now_;
    for (int i = 0; i < played_.total; ++i) best_order_.data[i] = played_.order.data[i];
  }

  replay played_;
  activation_limit memory_;
  random_numbers random_;
  buffer<int> best_order_;
  buffer<double> held_;
  buffer<int> path_;
  buffer<double> ends_;
  int path_count_ = 0;
  merit now_;
  merit best_;
  double longest_action_ = 0;
};

/// A line of orders, improved while the memory limit rises: the best order so far and its length.
struct ascent {
  plan best;
  double length = -1;

  constexpr void take(plan const& made, double made_length) {
    if (length >= 0 && made_length >= length) return;
    best = copy_of(made);
    length = made_length;
  }
  constexpr int improve(plan const& from, problem const& asked, effort const& how_hard, double bound, watched& watch) {
    annealing search(from, asked, how_hard.seed);
    int const tried = search.run(how_hard.trials, bound, watch);
    // If transfers occupy wires, a stopped search may return an order that is shorter than the finished search's. The order is
    // ignored: otherwise a longer search could give a longer result.
    if (watch.stopped() && asked.costs.occupies_wire()) return tried;
    if (length >= 0 && search.best_length() >= length) return tried;
    plan made = copy_of(from);
    search.write_best(made);
    // Local search assumes that every wire is free; only the simulation includes the waits of messages for a wire.
    double const made_length = asked.costs.occupies_wire() ? length_of(asked.goal, made, asked.costs) : search.best_length();
    if (length >= 0 && made_length >= length) return tried;
    best = static_cast<plan&&>(made);
    length = made_length;
    return tried;
  }
};

}  // namespace chevron::search::detail
