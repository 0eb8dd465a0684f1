#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/search/held.hpp>
#include <chevron/search/random.hpp>
#include <chevron/search/rows.hpp>

/// \file
/// Search for a period: the order in which each rank repeats its actions, judged without unrolling it.

namespace chevron::search::detail {

/// A steady pipeline. Each kind of a stage has one action for each microbatch of a period; every rank repeats them in a window as
/// long as the period, each for the microbatches that are so many windows late. Times that keep this order are kept with it, so that
/// what a change would push back is found from the change on.
class steady_order {
 public:
  constexpr steady_order(rows const& of, activation_limit memory, std::uint64_t seed, int in_period)
      : rows_(of),
        memory_(memory),
        random_(seed),
        per_(in_period),
        kinds_(of.whole ? 2 : 3),
        count_(kinds_ * of.stages * in_period),
        begin_(of.ranks + 1),
        sequence_(count_),
        at_(count_),
        late_(count_),
        start_(count_),
        old_sequence_(count_),
        old_late_(count_),
        old_start_(count_),
        best_sequence_(count_),
        best_late_(count_),
        queue_(count_ + 1),
        queued_(count_, zeroed),
        moved_(count_, zeroed),
        touched_(of.ranks, zeroed) {
    int filled = 0;
    for (int r = 0; r < of.ranks; ++r) {
      begin_.data[r] = filled;
      double work = 0;
      for (int row = 0; row < kinds_ * of.stages; ++row) {
        if (of.rank_of.data[row] != r) continue;
        work += lasts(row * per_) * per_;
        for (int j = 0; j < per_; ++j) sequence_.data[filled++] = row * per_ + j;
      }
      least_ = work > least_ ? work : least_;
    }
    begin_.data[of.ranks] = filled;
    for (int x = 0; x < count_; ++x) longest_ = lasts(x) > longest_ ? lasts(x) : longest_;
    begin();
  }

  constexpr bool exists() const { return period_ > 0; }
  constexpr double period() const { return best_period_ / per_; }
  constexpr double least() const { return least_ / per_; }

  /// Tries changes, the period being lowered where it can be.
  constexpr int run(int trials) {
    if (!exists()) return 0;
    double step = 0.02;
    int const pause = count_ / 4 + 8;
    for (int trial = 0; trial < trials; ++trial) {
      if (best_period_ <= least_ * (1 + 1e-9)) return trial;
      try_one();
      if (trial % pause == pause - 1) {
        bool const lower = lower_to(period_ * (1 - step));
        step = lower ? step * 1.5 : step * .7;
        if (step < 1e-4) step = 1e-4;
        if (step > .05) step = .05;
      }
    }
    return trials;
  }
  /// Goes about at the period that was reached.
  constexpr void walk(int trials) {
    for (int trial = 0; trial < trials; ++trial) try_one();
    keep_best();
  }

  /// Writes all ranks' orders as numbers of actions.
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

 private:
  constexpr double lasts(int x) const { return rows_.lasts.data[x / per_] + rows_.post.data[x / per_]; }
  constexpr int rank_of(int x) const { return rows_.rank_of.data[x / per_]; }
  /// What an action needs from another, or -1.
  constexpr int source(int x) const {
    int const row = x / per_;
    if (row < rows_.stages) return row > 0 ? x - per_ : -1;
    if (row >= 2 * rows_.stages) return x - rows_.stages * per_;
    return row + 1 < 2 * rows_.stages ? x + per_ : x - rows_.stages * per_;
  }
  constexpr double ready(int x) const {  // in the frame of x's window
    int const from = source(x);
    if (from < 0) return -1e300;
    int const row = x / per_;
    return start_.data[from] + rows_.lasts.data[from / per_] + (row < 2 * rows_.stages ? rows_.lag.data[row] : 0) -
           period_ * (late_.data[x] - late_.data[from]);
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
  /// Moves starts back until all is kept; false if that has no end.
  constexpr bool repair(int rounds) {
    int left = rounds * count_;
    double const slack = longest_ * 1e-10;
    bool fine = true;
    while (head_ != tail_) {
      int const x = queue_.data[head_];
      head_ = head_ == count_ ? 0 : head_ + 1;
      queued_.data[x] = false;
      if (!fine) continue;
      int const rank = rank_of(x);
      int const i = at_.data[x];
      bool const first = i == begin_.data[rank];
      int const before = sequence_.data[first ? begin_.data[rank + 1] - 1 : i - 1];
      double now = start_.data[before] + lasts(before) - (first ? period_ : 0);
      double const there = ready(x);
      now = there > now ? there : now;
      if (now <= start_.data[x] + slack) continue;
      if (--left < 0) {
        fine = false;
        continue;
      }
      start_.data[x] = now;
      push(sequence_.data[i + 1 == begin_.data[rank + 1] ? begin_.data[rank] : i + 1]);
      int const row = x / per_;
      int const stages = rows_.stages;
      if (row < stages) push(row + 1 < stages ? x + per_ : x + stages * per_);
      if (row >= stages && row < 2 * stages) {
        if (row > stages) push(x - per_);
        if (kinds_ == 3) push(x + stages * per_);
      }
    }
    return fine;
  }
  constexpr double change_of(int x) const {
    int const row = x / per_;
    if (row < rows_.stages) return 1;
    if (kinds_ == 2) return -1;
    return row < 2 * rows_.stages ? memory_.kept_for_weight - 1 : -memory_.kept_for_weight;
  }
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
    double const limit = memory_.most + held_rounding;
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

  /// Puts an action that is in no order into its rank's, where its start says.
  constexpr void insert(int x, int end) {
    int const rank = rank_of(x);
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

  /// Every microbatch as it would go alone, each way that much slower, at the shortest period that can be.
  constexpr void begin() {
    int const stages = rows_.stages;
    double shortest = -1;
    for (int draw = 0; draw < 12; ++draw) {
      double now = 0;
      double slower = 1;
      buffer<double> alone(3 * stages);
      for (int i = 0; i < 2 * stages; ++i) {
        int const row = i < stages ? i : 3 * stages - 1 - i;
        if (draw > 0 && i % rows_.ranks == 0) slower = 1 + 1.5 * random_.share();
        now += rows_.lag.data[row] * slower;
        alone.data[row] = now;
        now += rows_.lasts.data[row] * slower;
        if (row >= stages && kinds_ == 3) alone.data[row + stages] = now;
      }
      for (double period = least_ * 1.02; period < 64 * now * per_ + 1 && (shortest < 0 || period < shortest); period *= 1.03) {
        period_ = period;
        for (int x = 0; x < count_; ++x) {
          start_.data[x] = alone.data[x / per_] + x % per_ * period / per_;
          late_.data[x] = 0;
        }
        bool fine = true;
        for (int r = 0; r < rows_.ranks; ++r) {
          int end = begin_.data[r];
          for (int row = 0; row < kinds_ * stages; ++row) {
            if (rows_.rank_of.data[row] != r) continue;
            for (int j = 0; j < per_; ++j) insert(row * per_ + j, end++);
          }
          note(r);
        }
        for (int r = 0; r < rows_.ranks && fine; ++r) fine = lawful(r);
        if (!fine) continue;
        for (int x = 0; x < count_; ++x) push(x);
        if (!repair(12)) continue;
        shortest = period;
        best_period_ = period;
        keep_best();
        for (int x = 0; x < count_; ++x) old_start_.data[x] = start_.data[x];
        break;
      }
    }
    period_ = shortest;
    if (shortest < 0) return;
    for (int x = 0; x < count_; ++x) {
      start_.data[x] = old_start_.data[x];
      late_.data[x] = best_late_.data[x];
      sequence_.data[x] = best_sequence_.data[x];
    }
    for (int r = 0; r < rows_.ranks; ++r) note(r);
  }

  constexpr void keep_best() {
    best_period_ = period_;
    for (int x = 0; x < count_; ++x) {
      best_sequence_.data[x] = sequence_.data[x];
      best_late_.data[x] = late_.data[x];
    }
  }

  constexpr bool lower_to(double period) {
    double const was = period_;
    for (int x = 0; x < count_; ++x) old_start_.data[x] = start_.data[x];
    period_ = period < least_ ? least_ : period;
    for (int x = 0; x < count_; ++x) push(x);
    if (repair(12)) {
      if (period_ < best_period_) keep_best();
      return true;
    }
    period_ = was;
    for (int x = 0; x < count_; ++x) start_.data[x] = old_start_.data[x];
    return false;
  }

  constexpr void try_one() {
    int const stages = rows_.stages;
    int const x = random_.below(count_);
    int const rank = rank_of(x);
    int const from = begin_.data[rank];
    int const width = begin_.data[rank + 1] - from;
    bool const later = random_.coin();
    int const reach = random_.coin() ? 1 : 1 + random_.below(width);
    int other = at_.data[x] - from + (later ? reach : -reach);
    double by = 0;
    while (other >= width) other -= width, by += period_;
    while (other < 0) other += width, by -= period_;
    int const y = sequence_.data[from + other];
    by += start_.data[y] - start_.data[x] + (later ? lasts(y) : -lasts(x)) * random_.share() + (later ? 1 : -1) * longest_ * 1e-4;
    // Who goes with it.
    for (int i = 0; i < count_; ++i) {
      old_start_.data[i] = start_.data[i];
      old_late_.data[i] = late_.data[i];
      old_sequence_.data[i] = sequence_.data[i];
    }
    int const row = x / per_;
    int const place = x % per_;
    int const how = random_.below(4);
    auto const move = [&](int one) {
      moved_.data[one] = true;
      touched_.data[rank_of(one)] = true;
      start_.data[one] += by;
    };
    if (row >= 2 * stages || how == 0) {
      move(x);
    } else {
      int const at = row < stages ? row : 3 * stages - 1 - row;
      int first = at;
      int last = 2 * stages - 1;
      if (how != 1) {
        int const length = 1 + random_.below(random_.coin() ? 4 : stages);
        first = at - random_.below(length);
        last = first + length - 1;
        first = first < 0 ? 0 : first;
        last = last < 2 * stages ? last : 2 * stages - 1;
      }
      bool const all = per_ > 1 && random_.coin();
      for (int i = first; i <= last; ++i) {
        int const one = i < stages ? i : 3 * stages - 1 - i;
        for (int j = 0; j < per_; ++j) {
          if (!all && j != place) continue;
          move(one * per_ + j);
          if (one >= stages && kinds_ == 3) move((one + stages) * per_ + j);
        }
      }
    }
    bool fine = true;
    for (int r = 0; r < rows_.ranks; ++r) {
      if (!touched_.data[r]) continue;
      int end = begin_.data[r];
      for (int i = begin_.data[r]; i < begin_.data[r + 1]; ++i) {
        if (!moved_.data[old_sequence_.data[i]]) sequence_.data[end++] = old_sequence_.data[i];
      }
      for (int i = begin_.data[r]; i < begin_.data[r + 1]; ++i) {
        if (moved_.data[old_sequence_.data[i]]) insert(old_sequence_.data[i], end++);
      }
      note(r);
      fine = fine && lawful(r);
    }
    if (fine) {
      for (int r = 0; r < rows_.ranks; ++r) {
        for (int i = begin_.data[r]; touched_.data[r] && i < begin_.data[r + 1]; ++i) push(sequence_.data[i]);
      }
      for (int i = 0; i < count_; ++i) {
        if (!moved_.data[i]) continue;
        int const r = i / per_;
        if (r < stages) push(r + 1 < stages ? i + per_ : i + stages * per_);
        if (r >= stages && r < 2 * stages) {
          if (r > stages) push(i - per_);
          if (kinds_ == 3) push(i + stages * per_);
        }
      }
      fine = repair(2);
    }
    if (!fine) {
      for (int i = 0; i < count_; ++i) {
        start_.data[i] = old_start_.data[i];
        late_.data[i] = old_late_.data[i];
        sequence_.data[i] = old_sequence_.data[i];
      }
    }
    for (int r = 0; r < rows_.ranks; ++r) {
      if (!fine && touched_.data[r]) note(r);
      touched_.data[r] = false;
    }
    for (int i = 0; i < count_; ++i) moved_.data[i] = false;
  }

  rows const& rows_;
  activation_limit memory_;
  random_numbers random_;
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
  buffer<int> sequence_;
  buffer<int> at_;
  buffer<int> late_;
  buffer<double> start_;
  buffer<int> old_sequence_;
  buffer<int> old_late_;
  buffer<double> old_start_;
  buffer<int> best_sequence_;
  buffer<int> best_late_;
  buffer<int> queue_;
  buffer<bool> queued_;
  buffer<bool> moved_;
  buffer<bool> touched_;
};

}  // namespace chevron::search::detail
