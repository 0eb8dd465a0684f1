#pragma once

#include <chevron/plan/buffer.hpp>
#include <chevron/prove/rows.hpp>

/// \file
/// Simulates a step in the order of time, without a given order of actions: whenever a rank is free, a policy selects one of
/// the rank's ready actions. Eager orders and back filling are policies. List scheduling uses only `turns`: as a policy, list
/// scheduling took a fourth more of the compiler's evaluator operations, and a twelfth more time.

namespace chevron::detail {

/// Later than every time of a step.
inline constexpr double never = 1e300;

/// Selects which rank next tries to run an action: the rank with the earliest time, at equal times the lowest rank. A binary
/// tree stores the earliest times. Walks the tree from left to right through the ranks that are due now, and updates it on the
/// way: about two nodes per turn if all ranks are due at once, and never more than twice the depth of the tree.
class turns {
 public:
  /// All ranks are due at time 0.
  constexpr explicit turns(int ranks) {
    while (leaves_ < ranks) leaves_ *= 2;
    earliest_ = buffer<double>(2 * leaves_);
    double* const earliest = earliest_.data;
    for (int i = 0; i < leaves_; ++i) earliest[leaves_ + i] = i < ranks ? 0 : never;
    for (int i = leaves_ - 1; i > 0; --i) earliest[i] = earliest[2 * i];
    descend(1);
  }

  double now = 0;  ///< current time; `never`: no rank will try again
  int rank = 0;    ///< the rank that has the turn

  /// Sets the time of the next try of `rank`, and gives the turn to the next rank.
  constexpr void next_turn(double time) {
    double* const earliest = earliest_.data;
    bool const on = !goes_back_;
    int at = at_;
    earliest[at] = time;
    if (on && time <= now) return;
    while (at > 1) {
      double const beside = earliest[at ^ 1];
      if (at % 2 == 0 && beside <= now && on) {
        descend(at + 1);
        return;
      }
      if (beside < time) time = beside;
      at /= 2;
      earliest[at] = time;
    }
    now = time;
    goes_back_ = false;
    descend(1);
  }

  /// Lets a sleeping rank try at `time`, unless it tries earlier anyway.
  constexpr void wake(int sleeper, double time) {
    double* const earliest = earliest_.data;
    for (int i = leaves_ + sleeper; i > 0 && time < earliest[i]; i /= 2) earliest[i] = time;
    if (time <= now && leaves_ + sleeper < at_) goes_back_ = true;
  }

 private:
  constexpr void descend(int node) {
    double* const earliest = earliest_.data;
    int const leaves = leaves_;
    while (node < leaves) {
      node *= 2;
      if (earliest[node] > now) ++node;
    }
    at_ = node;
    rank = node - leaves;
  }

  int leaves_ = 1;
  int at_ = 1;
  bool goes_back_ = false;   // an action of cost 0 has woken a rank to the left, which is due now
  buffer<double> earliest_;  // node i: the earlier time of nodes 2i and 2i + 1; from `leaves_` on: the ranks' times
};

/// Values that a policy may return in place of a row.
inline constexpr int sleeps = -1, gives_up = -2;

/// Simulates a step: runs every action once, on its rank, in the order of time. A policy selects each rank's next action, or
/// lets the rank sleep until a message arrives. As in `rows`, messages that occupy ranks and microbatches of unequal length are
/// taken into account, waits for wires are not. A policy has
///
/// - `number(row, k)`: number of the action that a row runs k-th
/// - `take(rank, now, ready, taken, until)`: the row whose next action the rank runs now; or `sleeps`, until the time that the
///   policy writes into `until`, or until the input of a row's next action arrives; or `gives_up`, which ends the simulation.
///   By row, `ready` is the earliest start of the next action (`never`: not known, or none is left), `taken` the number of
///   actions that have run
/// - `free_again(number, now, end)`: the time at which a rank is free again that runs action `number` from `now` to `end`
///
/// \param backwards simulates from the end of the step to its beginning: consumers of a result run before its producer
/// \returns false if all ranks sleep or the policy gives up before every action has run
template <class Policy>
constexpr bool dispatch(rows const& of, Policy& policy, bool backwards = false) {
  int const micro_batches = of.micro_batches;
  int const count = of.count;
  int const all = of.stages * micro_batches;
  bool const alike = of.alike;
  double const* const lasts = of.lasts.data;
  double const* const lag = of.lag.data;
  int const* const rank_of = of.rank_of.data;
  int const* const needs = (backwards ? of.feeds : of.fed_by).data;
  int const* const feeds = (backwards ? of.fed_by : of.feeds).data;
  buffer<int> taken_memory(count, zeroed);
  buffer<double> ready_memory(count), start_memory(count * micro_batches), first_memory(backwards && of.kinds == 3 ? all : 0);
  buffer<bool> asleep_memory(of.ranks, zeroed);
  int* const taken = taken_memory.data;
  double* const ready = ready_memory.data;
  double* const start = start_memory.data;  // by number: the arrival of the action's last input
  double* const first = first_memory.data;  // by cell, backwards, of I's that need W and the I before: the first of both
  bool* const asleep = asleep_memory.data;
  for (double& one : first_memory) one = -1;
  // The row that a row feeds on its own stage: I feeds W, or backwards in time W feeds I.
  int const own_from = of.kinds < 3 ? 3 * count : (backwards ? 2 : 1) * of.stages;
  int const own_way = backwards ? -of.stages : of.stages;
  for (int row = 0; row < count; ++row) {
    int const fed_by_own = row - own_way;
    bool const open = needs[row] != 0 || (fed_by_own >= own_from && fed_by_own < own_from + of.stages);
    for (int m = 0; m < micro_batches; ++m) start[row * micro_batches + m] = open ? never : 0;
    ready[row] = open ? never : 0;
  }
  turns turn(of.ranks);
  auto const arrives = [&](int row, int number, double there) {
    if (backwards && of.kinds == 3 && row > of.stages && row < 2 * of.stages) {
      double& other = first[number - all];
      there = other > there ? other : there;
      bool const both = other >= 0;
      other = there;
      if (!both) return;
    }
    start[number] = there;
    if (policy.number(row, taken[row]) != number) return;
    ready[row] = there;
    // A rank that computes is not woken: it tries again when it is free.
    if (asleep[rank_of[row]]) turn.wake(rank_of[row], there);
  };
  for (int left = count * micro_batches; left > 0;) {
    double const now = turn.now;
    if (now == never) return false;
    double until = never;
    int const rank = turn.rank;
    int const row = policy.take(rank, now, ready, taken, until);
    if (row == gives_up) return false;
    asleep[rank] = row == sleeps;
    if (row == sleeps) {
      turn.next_turn(until);
      continue;
    }
    --left;
    int const number = policy.number(row, taken[row]);
    double const end = now + lasts[alike ? row : count + number];
    ready[row] = ++taken[row] < micro_batches ? start[policy.number(row, taken[row])] : never;
    if (int const step = feeds[row]; step != 0) {
      int const to = row + step / micro_batches;
      arrives(to, number + step, end + lag[alike ? (backwards ? row : to) : count + (backwards ? number : number + step)]);
    }
    if (row >= own_from && row < own_from + of.stages) arrives(row + own_way, number + own_way * micro_batches, end);
    turn.next_turn(policy.free_again(number, now, end));
  }
  return true;
}

}  // namespace chevron::detail
