#pragma once

#include <chevron/plan/buffer.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/dispatch.hpp>
#include <chevron/tools/search/held.hpp>

/// \file
/// A period: the order of actions that each rank repeats, with start times.

namespace chevron::search::detail {

/// A pipeline in its steady state. Each kind of a stage has one action for each microbatch of a period. Every rank repeats its
/// actions in a window as long as the period; an action that is k windows late runs for the microbatches of the k-th window
/// before. Start times are stored with the order, so that only the actions that a change affects are computed again.
class period_order {
 public:
  constexpr period_order(chevron::detail::rows const& of, activation_limit memory, int in_period)
      : rows_(of),
        memory_(memory),
        per_(in_period),
        kinds_(of.kinds),
        count_(kinds_ * of.stages * in_period),
        begin_(of.ranks + 1),
        sequence_(count_),
        at_(count_),
        late_(count_),
        start_(count_),
        best_sequence_(count_),
        best_late_(count_),
        queue_(count_ + 1),
        queued_(count_, zeroed),
        rank_(count_),
        lasts_(count_),
        source_(count_),
        comes_after_(count_),
        feeds_(count_),
        weight_(count_) {
    link();
    int filled = 0;
    for (int r = 0; r < of.ranks; ++r) {
      begin_.data[r] = filled;
      double work = 0;
      for (int row = 0; row < kinds_ * of.stages; ++row) {
        if (of.rank_of.data[row] != r) continue;
        work += lasts_.data[row * per_] * per_;
        for (int j = 0; j < per_; ++j) sequence_.data[filled++] = row * per_ + j;
      }
      least_ = work > least_ ? work : least_;
    }
    begin_.data[of.ranks] = filled;
    for (int x = 0; x < count_; ++x) longest_ = lasts_.data[x] > longest_ ? lasts_.data[x] : longest_;
  }

  constexpr bool exists() const { return best_period_ > 0; }
  /// `period`: the shortest period found; `least`: its lower bound, the work of the busiest rank. Both per microbatch.
  constexpr double period() const { return best_period_ / per_; }
  constexpr double least() const { return least_ / per_; }

  /// Writes the orders of all ranks, as numbers of actions.
  constexpr void unroll(int* order) const {
    int const micro_batches = rows_.micro_batches;
    int const periods = (micro_batches + per_ - 1) / per_;
    int at = 0;
    for (int r = 0; r < rows_.ranks; ++r) {
      int least = 1 << 30;
      int most = -(1 << 30);
      for (int i = begin_.data[r]; i < begin_.data[r + 1]; ++i) {
        int const late = best_late_.data[best_sequence_.data[i]];
        least = late < least ? late : least;
        most = late > most ? late : most;
      }
      for (int n = least; n < most + periods; ++n) {
        for (int i = begin_.data[r]; i < begin_.data[r + 1]; ++i) {
          int const x = best_sequence_.data[i];
          int const m = (n - best_late_.data[x]) * per_ + x % per_;
          if (m >= 0 && n >= best_late_.data[x] && m < micro_batches) order[at++] = x / per_ * micro_batches + m;
        }
      }
    }
  }

 protected:
  /// The time at which an action's input arrives, relative to the action's own window.
  constexpr double ready(int x) const {
    int const from = source_.data[x];
    if (from < 0) return -chevron::detail::never;
    return start_.data[from] + comes_after_.data[x] - period_ * (late_.data[x] - late_.data[from]);
  }
  /// Queues the actions that take this action's result, since they may have to start later.
  constexpr void push_fed(int x) {
    if (feeds_.data[x] >= 0) push(feeds_.data[x]);
    if (weight_.data[x] >= 0) push(weight_.data[x]);
  }

  constexpr void note(int rank) {
    for (int i = begin_.data[rank]; i < begin_.data[rank + 1]; ++i) at_.data[sequence_.data[i]] = i;
  }
  constexpr void push(int x) {
    if (queued_.data[x]) return;
    queued_.data[x] = true;
    queue_.data[tail_] = x;
    tail_ = tail_ == count_ ? 0 : tail_ + 1;
  }
  /// Delays the starts of queued actions and their successors until each has its input and a free rank. \returns false if that
  /// takes more than `rounds` delays per action, on average
  constexpr bool repair(int rounds) {
    int left = rounds * count_;
    double const slack = longest_ * 1e-10;
    bool fine = true;
    while (head_ != tail_) {
      int const x = queue_.data[head_];
      head_ = head_ == count_ ? 0 : head_ + 1;
      queued_.data[x] = false;
      if (!fine) continue;
      int const i = at_.data[x];
      int const opens = begin_.data[rank_.data[x]];
      int const closes = begin_.data[rank_.data[x] + 1];
      int const before = sequence_.data[(i == opens ? closes : i) - 1];
      double now = start_.data[before] + lasts_.data[before] - (i == opens ? period_ : 0);
      double const there = ready(x);
      now = there > now ? there : now;
      if (now <= start_.data[x] + slack) continue;
      if (--left < 0) {
        fine = false;
        continue;
      }
      start_.data[x] = now;
      push(sequence_.data[i + 1 == closes ? opens : i + 1]);
      push_fed(x);
    }
    return fine;
  }
  constexpr double change_of(int x) const { return held_change(rows_.kind_of(x / per_), memory_); }
  /// Whether a rank's order keeps the laws and the limit.
  constexpr bool lawful(int rank) const {
    int const stages = rows_.stages * per_;
    double held = 0;
    for (int i = begin_.data[rank]; i < begin_.data[rank + 1]; ++i) {
      int const x = sequence_.data[i];
      held -= change_of(x) * late_.data[x];
      if (x >= stages && !before(x - stages, x)) return false;
      if (per_ > 1 && !(x % per_ + 1 < per_ ? before(x, x + 1) : before(x, x + 1 - per_, 1))) return false;
    }
    if (!(memory_.most > 0)) return true;
    double const limit = memory_.most + activation_limit::rounding;
    for (int i = begin_.data[rank]; i < begin_.data[rank + 1]; ++i) {
      held += change_of(sequence_.data[i]);
      if (held > limit) return false;
    }
    return true;
  }
  constexpr bool before(int x, int y, int later = 0) const {
    int const apart = late_.data[y] + later - late_.data[x];
    return apart > 0 || (apart == 0 && at_.data[x] < at_.data[y]);
  }

  /// Inserts an action into its rank's order by its start time.
  constexpr void insert(int x, int end) {
    int const rank = rank_.data[x];
    int const from = begin_.data[rank];
    if (end > from) {
      double const opens = start_.data[sequence_.data[from]];
      double& start = start_.data[x];
      while (start < opens) start += period_, --late_.data[x];
      while (start >= opens + period_) start -= period_, ++late_.data[x];
    }
    int i = end;
    for (; i > from && start_.data[sequence_.data[i - 1]] > start_.data[x]; --i) sequence_.data[i] = sequence_.data[i - 1];
    sequence_.data[i] = x;
  }

  constexpr void keep_best() {
    best_period_ = period_;
    for (int x = 0; x < count_; ++x) {
      best_sequence_.data[x] = sequence_.data[x];
      best_late_.data[x] = late_.data[x];
    }
  }

  /// Copies facts of rows to each action, since a change reads them many times.
  constexpr void link() {
    int const stages = rows_.stages;
    for (int x = 0; x < count_; ++x) {
      int const row = x / per_;
      bool const weight = row >= 2 * stages;
      int const back = weight ? -stages : rows_.fed_by.data[row] / rows_.micro_batches;
      int const ahead = rows_.feeds.data[row] / rows_.micro_batches;
      rank_.data[x] = rows_.rank_of.data[row];
      lasts_.data[x] = rows_.lasts.data[row] + rows_.post.data[row];
      source_.data[x] = back == 0 ? -1 : x + back * per_;
      comes_after_.data[x] = back == 0 ? 0 : rows_.lasts.data[row + back] + rows_.lag.data[row];
      feeds_.data[x] = ahead == 0 ? -1 : x + ahead * per_;
      weight_.data[x] = row >= stages && !weight && kinds_ == 3 ? x + stages * per_ : -1;
    }
  }

  chevron::detail::rows const& rows_;
  activation_limit memory_;
  int per_;
  int kinds_;
  int count_;
  double period_ = -1;
  double least_ = 0;
  double longest_ = 0;
  double best_period_ = -1;
  int head_ = 0;
  int tail_ = 0;
  buffer<int> begin_;
  buffer<int> sequence_;  // actions of one window, rank after rank
  buffer<int> at_;
  buffer<int> late_;      // by action: how many windows it is late
  buffer<double> start_;  // by action: its start for the first microbatches, less `late_` periods
  buffer<int> best_sequence_;
  buffer<int> best_late_;
  buffer<int> queue_;  // ring buffer of actions that may have to start later
  buffer<bool> queued_;
  buffer<int> rank_;
  buffer<double> lasts_;        // by action: duration, including sends that occupy the rank
  buffer<int> source_;          // by action: the action whose result it takes; -1: none
  buffer<double> comes_after_;  // by action: least time from its source's start to its own
  buffer<int> feeds_;           // by action: the action on another stage that takes its result; -1: none
  buffer<int> weight_;          // by action: the W of an I; -1: not an I with a W
};

}  // namespace chevron::search::detail
