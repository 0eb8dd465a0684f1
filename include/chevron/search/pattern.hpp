#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/search/held.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/random.hpp>
#include <chevron/search/replay.hpp>

/// \file
/// Search among orders that repeat: what is changed is one period, and all microbatches change with it.

namespace chevron::search::detail {

/// A periodic order: each kind of a stage has a key for each microbatch of a period, and every rank takes its actions in the
/// order of their keys, a period later adding the period's length. Annealing changes keys: one kind's, everything from
/// one kind on along a microbatch's way, or a part of that way. Orders that hold more than the limit or get stuck are not taken.
class patterns {
 public:
  /// \param like a plan of this size on this placement; its actions say whether backwards are split
  constexpr patterns(plan_view const& like, cost_view const& costs, activation_limit memory, objective goal, std::uint64_t seed,
                     int in_period)
      : played_(like, costs, goal),
        memory_(memory),
        random_(seed),
        per_(in_period),
        way_(2 * like.stages),
        keys_(3 * like.stages * in_period),
        tried_keys_(3 * like.stages * in_period),
        rows_begin_(like.size.ranks + 1),
        rows_(3 * like.stages),
        slots_(3 * like.stages * in_period),
        tried_slots_(3 * like.stages * in_period),
        good_order_(like.total()),
        best_order_(like.total()),
        changed_(like.size.ranks) {
    kinds_ = played_.whole ? 2 : 3;
    int const stages = like.stages;
    for (int s = 0; s < stages; ++s) {
      way_.data[s] = s;
      way_.data[stages + s] = 2 * stages - 1 - s;
    }
    int filled = 0;
    for (int r = 0; r < like.size.ranks; ++r) {
      rows_begin_.data[r] = filled;
      for (int row = 0; row < kinds_ * stages; ++row) {
        if (played_.rank_of.data[row] == r) rows_.data[filled++] = row;
      }
      double work = 0;
      for (int i = rows_begin_.data[r]; i < filled; ++i) work += lasts(rows_.data[i]);
      work_ = work > work_ ? work : work_;
    }
    rows_begin_.data[like.size.ranks] = filled;
    for (int row = 0; row < kinds_ * stages; ++row) longest_ = lasts(row) > longest_ ? lasts(row) : longest_;
    begin();
  }

  constexpr bool exists() const { return best_length_ >= 0; }
  constexpr double best_length() const { return best_length_; }
  constexpr action best_action(int i) const { return played_.action_of(best_order_.data[i]); }

  constexpr int run(int trials, double bound, double heat) {
    if (!exists()) return 0;
    for (int trial = 0; trial < trials; ++trial) {
      if (best_length_ <= bound * (1 + 1e-12)) return trial;
      double const left = static_cast<double>(trials - trial) / trials;
      try_one(longest_ * heat * left);
    }
    return trials;
  }

 private:
  struct slot {
    int row_and_place = 0;  // row · per + place
    int late = 0;           // by how many periods
    double phase = 0;
  };

  constexpr double lasts(int row) const { return played_.lasts.data[row] + played_.post.data[row]; }

  /// Every microbatch as it would go alone, at the shortest period that memory allows then.
  constexpr void begin() {
    int const stages = played_.stages;
    double now = 0;
    buffer<double> alone(3 * stages);
    for (int i = 0; i < 2 * stages; ++i) {
      int const row = way_.data[i];
      now += played_.lag.data[row];
      alone.data[row] = now;
      now += played_.lasts.data[row];
      if (row >= stages && kinds_ == 3) alone.data[row + stages] = now;
    }
    for (period_ = work_ * per_; period_ < 64 * now * per_ + 1; period_ *= 1.05) {
      for (int row = 0; row < kinds_ * stages; ++row) {
        for (int j = 0; j < per_; ++j) keys_.data[row * per_ + j] = alone.data[row] + j * period_ / per_;
      }
      bool fine = true;
      for (int r = 0; r < played_.ranks && fine; ++r) {
        arrange(r, keys_.data, slots_.data);
        fine = unroll(r, slots_.data);
      }
      if (fine && played_.play()) {
        judge();
        now_length_ = length_;
        now_energy_ = energy_;
        keep(true);
        return;
      }
    }
  }

  constexpr void judge() {
    length_ = 0;
    double sum = 0;
    for (int r = 0; r < played_.ranks; ++r) {
      double const one = played_.length_of(r);
      length_ = one > length_ ? one : length_;
      sum += one;
    }
    energy_ = length_ + .05 * sum / played_.ranks;
  }
  constexpr void keep(bool all) {
    for (int r = 0; r < played_.ranks; ++r) {
      if (!all && !changed_.data[r]) continue;
      for (int i = played_.begin.data[r]; i < played_.begin.data[r + 1]; ++i) good_order_.data[i] = played_.order.data[i];
    }
    if (best_length_ >= 0 && now_length_ >= best_length_) return;
    best_length_ = now_length_;
    for (int i = 0; i < played_.total; ++i) best_order_.data[i] = played_.order.data[i];
  }

  /// Sorts a rank's kinds by their phase in the period.
  constexpr void arrange(int rank, double const* keys, slot* all) const {
    int const from = rows_begin_.data[rank] * per_;
    int count = 0;
    for (int i = rows_begin_.data[rank]; i < rows_begin_.data[rank + 1]; ++i) {
      for (int j = 0; j < per_; ++j) {
        int const which = rows_.data[i] * per_ + j;
        double const periods = keys[which] / period_;
        int late = static_cast<int>(periods);
        if (late > periods) --late;
        slot one{which, late, keys[which] - late * period_};
        int place = from + count++;
        for (; place > from && all[place - 1].phase > one.phase; --place) all[place] = all[place - 1];
        all[place] = one;
      }
    }
  }
  /// Writes a rank's order; false if it holds too much, or goes on where nothing can be.
  constexpr bool unroll(int rank, slot const* all) {
    int const from = rows_begin_.data[rank] * per_;
    int const to = rows_begin_.data[rank + 1] * per_;
    int const micro_batches = played_.micro_batches;
    int least = 1 << 30;
    int most = -(1 << 30);
    for (int i = from; i < to; ++i) {
      least = all[i].late < least ? all[i].late : least;
      most = all[i].late > most ? all[i].late : most;
    }
    int* const order = played_.order.data;
    int at = played_.begin.data[rank];
    double held = 0;
    double const limit = memory_.most > 0 ? memory_.most + held_rounding : 1e300;
    int const periods = (micro_batches + per_ - 1) / per_;
    for (int n = least; n < most + periods; ++n) {
      for (int i = from; i < to; ++i) {
        int const row = all[i].row_and_place / per_;
        int const m = (n - all[i].late) * per_ + all[i].row_and_place % per_;
        if (m < 0 || m >= micro_batches) continue;
        order[at++] = row * micro_batches + m;
        held += row < played_.stages       ? 1
                : kinds_ == 2              ? -1
                : row < 2 * played_.stages ? memory_.kept_for_weight - 1
                                           : -memory_.kept_for_weight;
        if (held > limit) return false;
      }
    }
    return true;
  }

  constexpr void try_one(double hot) {
    int const stages = played_.stages;
    int const count = kinds_ * stages * per_;
    double* const keys = tried_keys_.data;
    for (int i = 0; i < count; ++i) keys[i] = keys_.data[i];
    // One action of the period is to come directly before or after another of its rank.
    int const row = random_.below(kinds_ * stages);
    int const place = random_.below(per_);
    int const rank = played_.rank_of.data[row];
    int const width = (rows_begin_.data[rank + 1] - rows_begin_.data[rank]) * per_;
    slot const* const mine = slots_.data + rows_begin_.data[rank] * per_;
    int self = 0;
    while (mine[self].row_and_place != row * per_ + place) ++self;
    bool const later = random_.coin();
    int const reach = random_.coin() ? 1 : 1 + random_.below(width);
    int other = self + (later ? reach : -reach);
    double turns = 0;
    while (other >= width) other -= width, turns += period_;
    while (other < 0) other += width, turns -= period_;
    double const by = mine[other].phase + turns - mine[self].phase + (later ? 1 : -1) * period_ * 1e-4 * random_.share();
    // Who goes with it.
    int const how = random_.below(4);
    if (row >= 2 * stages || how == 0) {
      keys[row * per_ + place] += by;
    } else {
      int const at = row < stages ? row : 3 * stages - 1 - row;
      int from = at;
      int to = at;
      if (how == 1) {
        to = 2 * stages - 1;
      } else {
        int const length = 1 + random_.below(random_.coin() ? 4 : stages);
        from = at - random_.below(length);
        to = from + length - 1;
        from = from < 0 ? 0 : from;
        to = to < 2 * stages ? to : 2 * stages - 1;
      }
      bool const all = per_ > 1 && random_.coin();
      for (int i = from; i <= to; ++i) {
        int const one = way_.data[i];
        for (int j = 0; j < per_; ++j) {
          if (!all && j != place) continue;
          keys[one * per_ + j] += by;
          if (one >= stages && kinds_ == 3) keys[(one + stages) * per_ + j] += by;
        }
      }
    }
    // F before I before W, and a place's microbatches in their order.
    for (int i = 0; i < stages * per_; ++i) {
      if (!(keys[i] < keys[i + stages * per_])) return;
      if (kinds_ == 3 && !(keys[i + stages * per_] < keys[i + 2 * stages * per_])) return;
    }
    for (int r = 0; per_ > 1 && r < kinds_ * stages; ++r) {
      for (int j = 0; j + 1 < per_; ++j) {
        if (!(keys[r * per_ + j] < keys[r * per_ + j + 1])) return;
      }
      if (!(keys[r * per_ + per_ - 1] < keys[r * per_] + period_)) return;
    }
    bool any = false;
    bool fine = true;
    for (int r = 0; r < played_.ranks; ++r) {
      arrange(r, keys, tried_slots_.data);
      bool same = true;
      for (int i = rows_begin_.data[r] * per_; i < rows_begin_.data[r + 1] * per_; ++i) {
        same = same && slots_.data[i].row_and_place == tried_slots_.data[i].row_and_place &&
               slots_.data[i].late == tried_slots_.data[i].late;
      }
      changed_.data[r] = !same;
      any = any || !same;
    }
    for (int r = 0; r < played_.ranks && fine; ++r) {
      if (changed_.data[r]) fine = unroll(r, tried_slots_.data);
    }
    if (fine && any) {
      fine = played_.play();
      judge();
      double const chance = random_.share();
      fine = fine && energy_ <= now_energy_ + hot * 3 * chance * chance;
    }
    if (fine) {
      for (int i = 0; i < count; ++i) keys_.data[i] = keys[i];
      for (int i = 0; i < count; ++i) slots_.data[i] = tried_slots_.data[i];
      if (!any) return;
      now_length_ = length_;
      now_energy_ = energy_;
      keep(false);
      return;
    }
    for (int r = 0; r < played_.ranks; ++r) {
      if (!changed_.data[r]) continue;
      for (int i = played_.begin.data[r]; i < played_.begin.data[r + 1]; ++i) played_.order.data[i] = good_order_.data[i];
    }
  }

  replay played_;
  activation_limit memory_;
  random_numbers random_;
  int per_;
  int kinds_ = 3;
  double period_ = 0;
  double work_ = 0;
  double longest_ = 0;
  buffer<int> way_;  // the rows of a microbatch's way
  buffer<double> keys_;
  buffer<double> tried_keys_;
  buffer<int> rows_begin_;
  buffer<int> rows_;
  buffer<slot> slots_;
  buffer<slot> tried_slots_;
  buffer<int> good_order_;
  buffer<int> best_order_;
  buffer<bool> changed_;
  double length_ = 0;
  double energy_ = 0;
  double now_length_ = 0;
  double now_energy_ = 0;
  double best_length_ = -1;
};

}  // namespace chevron::search::detail
