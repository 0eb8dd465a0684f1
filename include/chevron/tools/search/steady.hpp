#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/tools/search/backfill.hpp>
#include <chevron/tools/search/period.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/problem/random.hpp>
#include <chevron/tools/search/replay.hpp>

/// \file
/// Searches for a short period, and for short orders made by unrolling it.

namespace chevron::search::detail {

/// Local search for a short period that keeps the limit. A change moves some actions; it is kept if all actions that have to
/// start later as a result still fit into the current period. From time to time the search tries a shorter period.
class steady_order : public period_order {
 public:
  /// \param like a replay of an order: the search begins with the order's middle if the middle is periodic; or nullptr
  constexpr steady_order(chevron::detail::rows const& of, activation_limit memory, std::uint64_t seed, int in_period,
                         replay const* like = nullptr)
      : period_order(of, memory, in_period),
        random_(seed),
        old_sequence_(count_),
        old_late_(count_),
        old_start_(count_),
        moved_(count_, zeroed),
        touched_(of.ranks, zeroed) {
    if (like != nullptr && begin_like(*like)) return;
    begin();
  }

  /// Tries changes, and from time to time a shorter period. \returns the number of changes tried
  constexpr int run(int trials, watched& watch) {
    if (!exists()) return 0;
    double step = 0.02;
    int const pause = count_ / 4 + 8;
    for (int trial = 0; trial < trials; ++trial) {
      if (best_period_ <= least_ * (1 + 1e-9)) return trial;
      if (trial % watched::every == 0 && watch.stop()) return trial;
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
  /// Tries changes at the current period.
  constexpr void walk(int trials) {
    for (int trial = 0; trial < trials; ++trial) try_one();
    keep_best();
  }

 private:
  // In experiments, successful repairs ended within fewer rounds; three times as many rounds gave the same orders.
  static constexpr int rounds_to_settle = 4;
  // One round is too few for plans with many microbatches.
  static constexpr int rounds_of_a_change = 2;

  /// Begins with the middle of an order, if the order is periodic there. \returns false if it is not
  constexpr bool begin_like(replay const& played) {
    int const micro_batches = rows_.micro_batches;
    int const first = (micro_batches / 2 / per_) * per_;
    for (int r = 0; r < rows_.ranks; ++r) {
      int entry = 0;
      while (rows_.rank_of.data[entry] != r) ++entry;
      if (first + per_ >= micro_batches) return false;
      int at = played.begin.data[r];
      while (played.order.data[at] != entry * micro_batches + first) ++at;
      for (int i = begin_.data[r]; i < begin_.data[r + 1]; ++i, ++at) {
        if (at == played.begin.data[r + 1]) return false;
        int const a = played.order.data[at];
        int const row = a / micro_batches;
        int const apart = first - (a - row * micro_batches) + per_ * micro_batches;
        int const late = (apart + per_ - 1) / per_ - micro_batches;
        int const x = row * per_ + late * per_ - (apart - per_ * micro_batches);
        for (int before = begin_.data[r]; before < i; ++before) {
          if (sequence_.data[before] == x) return false;
        }
        sequence_.data[i] = x;
        late_.data[x] = late;
        start_.data[x] = played.finish.data[a] - rows_.lasts.data[rows_.time_at(a)];
      }
      note(r);
      if (!lawful(r)) return false;
    }
    for (int x = 0; x < count_; ++x) old_start_.data[x] = start_.data[x];
    for (period_ = least_; period_ < 2 * least_; period_ *= 1.01) {
      for (int x = 0; x < count_; ++x) {
        start_.data[x] = old_start_.data[x];
        push(x);
      }
      if (!repair(rounds_to_settle)) continue;
      keep_best();
      return true;
    }
    return false;
  }

  /// Begins with the times that each microbatch would have alone, stretched by a random factor, at the shortest period that
  /// they allow.
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
        if (!repair(rounds_to_settle)) continue;
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

  constexpr bool lower_to(double period) {
    double const was = period_;
    for (int x = 0; x < count_; ++x) old_start_.data[x] = start_.data[x];
    period_ = period < least_ ? least_ : period;
    for (int x = 0; x < count_; ++x) push(x);
    if (repair(rounds_to_settle)) {
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
    int const rank = rank_.data[x];
    int const from = begin_.data[rank];
    int const width = begin_.data[rank + 1] - from;
    bool const later = random_.coin();
    int const reach = random_.coin() ? 1 : 1 + random_.below(width);
    int other = at_.data[x] - from + (later ? reach : -reach);
    double by = 0;
    while (other >= width) other -= width, by += period_;
    while (other < 0) other += width, by -= period_;
    int const y = sequence_.data[from + other];
    by += start_.data[y] - start_.data[x];
    by += (later ? lasts_.data[y] : -lasts_.data[x]) * random_.share() + (later ? 1 : -1) * longest_ * 1e-4;
    // Saves the state, then chooses the actions that move together with x.
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
      touched_.data[rank_.data[one]] = true;
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
        if (moved_.data[i]) push_fed(i);
      }
      fine = repair(rounds_of_a_change);
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

  random_numbers random_;
  buffer<int> old_sequence_;
  buffer<int> old_late_;
  buffer<double> old_start_;
  buffer<bool> moved_;
  buffer<bool> touched_;
};

/// The effort of `periodic_start`, and two lengths: one that ends the search, and one that its result must beat.
struct periodic_effort {
  std::uint64_t seed;
  int draws;     ///< number of periods that are searched
  int samples;   ///< number of orders made of each period
  int trials;    ///< number of changes tried for each period
  double bound;  ///< lower bound of all orders' lengths: an order of this length ends the search
  double beat;   ///< the result must be shorter than this length; below 0: no such condition
};

/// The shortest of several periodic orders, if it is shorter than `beat`; otherwise a plan without actions. Every other period
/// is made as if messages took twice as long. Each period gives `samples` orders, with waits filled at their beginnings and
/// ends.
/// \param tried is increased by the number of changes that were tried
constexpr plan periodic_start(plan const& like, problem const& asked, periodic_effort const& how_hard, std::int64_t& tried,
                              watched& watch) {
  // In experiments, an order longer than the best by this factor after two passes was not shorter after four.
  constexpr double hopeless = 1.05;
  auto const [seed, draws, samples, trials, bound, beat] = how_hard;
  if (like.size.slices > 1) return {};  // a period consists of whole microbatches
  replay played(like, asked.costs, asked.goal);
  owned_costs const late = with_slower_messages(asked.costs, like.stages, 2);
  replay const slower(like, late.view(), asked.goal);
  backfill filling(played, asked.memory);
  plan best;
  best.size = like.size;
  double shortest = beat;
  for (int draw = 0; draw < draws && !watch.stop(); ++draw) {
    int const in_period = 1 + 2 * draw / draws;
    if (in_period > like.size.units()) continue;
    if (draw == 0) played.play();
    steady_order repeat(draw % 2 == 0 ? played : slower, asked.memory, seed + static_cast<std::uint64_t>(draw), in_period,
                        draw == 0 ? &played : nullptr);
    if (!repeat.exists()) continue;
    tried += repeat.run(trials, watch);
    if (shortest > 0 && repeat.period() * (like.size.units() - like.size.ranks) > shortest) continue;
    for (int sample = 0; sample < samples; ++sample) {
      if (shortest >= 0 && shortest <= bound * (1 + 1e-12)) return best;
      if (sample > 0 && watch.stop()) break;
      if (sample > 0) repeat.walk(50);
      repeat.unroll(played.order.data);
      for (int pass = 0; pass <= 4; ++pass) {
        if (pass > 0 && (watch.stop() || !filling.pass(pass % 2 == 0))) break;
        if (!played.play()) break;
        double const length = played.length();
        if (shortest >= 0 && length >= shortest) {
          if (pass >= 2 && length > shortest * hopeless) break;
          continue;
        }
        shortest = length;
        if (best.actions.count == 0) best = copy_of(like);
        best.name = "a periodic order";
        played.write_to(best);
      }
    }
  }
  return best;
}

}  // namespace chevron::search::detail
