#pragma once

#include <cstdint>
#include <utility>

#include <chevron/plan/buffer.hpp>
#include <chevron/search/effort.hpp>
#include <chevron/search/held.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/random.hpp>
#include <chevron/search/replay.hpp>

/// \file
/// Orders in which no rank waits while it could do anything: what a search by span begins with where memory is plentiful.

namespace chevron::search::detail {

/// What a rank does first of what it can do, in a part of the step. Numbers of microbatches are those of the first and of the last
/// rank; in between, in proportion.
struct eager_phase {
  double few[2];   ///< with fewer in flight, from F to I, F goes first, then I
  double most[2];  ///< with so many in flight no F
  double left;     ///< with so many W left to do, W goes first; it is the last choice otherwise
};

/// The same in all of a step: in its beginning forwards have to be many, in its end W have to be left for when nothing else is.
struct eager_rule {
  static constexpr int parts = 3;
  eager_phase phases[parts];
  double turns[parts - 1];  ///< the share of its first stage's F after which a rank is in the next phase
  double most_early;        ///< of `most`, the share that F of the first half of the stages may take
  bool late[3];             ///< by kind: the rank's later stages first
};

/// A time that does not come.
inline constexpr double never = 1e300;

/// Plays orders by such rules. (Schedules without needless waits are "non-delay" ones: Baker, Introduction to Sequencing and
/// Scheduling, 1974.)
class eager_order {
 public:
  constexpr eager_order(replay& played, activation_limit memory)
      : played_(played),
        memory_(memory),
        all_(played.stages * played.micro_batches),
        end_(3 * all_),
        next_(3 * played.stages),
        stages_begin_(played.ranks + 1),
        stages_(played.stages),
        filled_(played.ranks),
        free_(played.ranks),
        wakes_(played.ranks),
        held_(played.ranks),
        in_flight_(played.ranks),
        work_(played.ranks),
        left_(played.ranks),
        begun_(played.ranks) {
    for (int r = 0; r < played.ranks; ++r) work_.data[r] = 0;
    for (int a = 0; a < 3 * all_; ++a) {
      work_.data[played.rank_of.data[played.row_of.data[a]]] += played.lasts.data[played.time_of.data[a]];
    }
    int filled = 0;
    for (int r = 0; r < played.ranks; ++r) {
      stages_begin_.data[r] = filled;
      for (int s = 0; s < played.stages; ++s) {
        if (played.rank_of.data[s] == r) stages_.data[filled++] = s;
      }
    }
    stages_begin_.data[played.ranks] = filled;
  }

  /// Puts an order in place of the replay's; false if it gets stuck, or comes to a span above the longest.
  constexpr bool make(eager_rule const& rule, double longest) {
    for (int a = 0; a < 3 * all_; ++a) end_.data[a] = never;
    for (int row = 0; row < 3 * played_.stages; ++row) next_.data[row] = 0;
    for (int r = 0; r < played_.ranks; ++r) {
      filled_.data[r] = played_.begin.data[r];
      free_.data[r] = wakes_.data[r] = held_.data[r] = in_flight_.data[r] = 0;
      begun_.data[r] = never;
      left_.data[r] = work_.data[r];
    }
    for (int left = played_.total; left > 0;) {
      int rank = 0;
      for (int r = 1; r < played_.ranks; ++r) rank = wakes_.data[r] < wakes_.data[rank] ? r : rank;
      double const now = wakes_.data[rank];
      if (now >= never) return false;
      int const row = choose(rank, now, rule);
      if (row < 0) continue;
      take(rank, row, now);
      --left;
      if (end_.data[played_.order.data[filled_.data[rank] - 1]] - begun_.data[rank] + left_.data[rank] > longest) return false;
    }
    return true;
  }

 private:
  constexpr double ready(int a) const {
    int const row = played_.row_of.data[a];
    double there = row >= played_.stages ? end_.data[a - all_] : 0;
    if (int const step = played_.fed_by.data[row]; step != 0 && there < never) {
      double const sent = end_.data[a + step] + played_.lag.data[played_.time_of.data[a]];
      there = sent > there ? sent : there;
    }
    return there;
  }

  /// The row of what a rank does now, or -1: then it sleeps until that may be different.
  constexpr int choose(int rank, double now, eager_rule const& rule) {
    int const first = stages_begin_.data[rank];
    int const count = stages_begin_.data[rank + 1] - first;
    double const entered = count > 0 ? next_.data[stages_.data[first]] : 0;
    int in = 0;
    while (in < eager_rule::parts - 1 && entered >= rule.turns[in] * played_.micro_batches) ++in;
    eager_phase const& phase = rule.phases[in];
    double const part = played_.ranks > 1 ? static_cast<double>(rank) / (played_.ranks - 1) : 0;
    double const few = phase.few[0] + (phase.few[1] - phase.few[0]) * part;
    double const most = phase.most[0] + (phase.most[1] - phase.most[0]) * part;
    double const flying = in_flight_.data[rank];
    int left = 0;  // W
    double sooner = never;
    int can[3] = {-1, -1, -1};
    for (int k = 0; k < 3; ++k) {
      for (int i = 0; i < count; ++i) {
        int const stage = stages_.data[first + (rule.late[k] ? count - 1 - i : i)];
        int const row = k * played_.stages + stage;
        if (k == 2) left += next_.data[row - played_.stages] - next_.data[row];
        int const m = next_.data[row];
        if (m >= played_.micro_batches || can[k] >= 0) continue;
        if (k == 0) {
          double const room = 2 * stage < played_.stages ? most * rule.most_early : most;
          bool const full = memory_.most > 0 && held_.data[rank] + 1 > memory_.most + activation_limit::rounding;
          if (full || (flying > 0 && flying >= room)) continue;  // full with nothing in flight: there is a W to run
        }
        double const there = ready(row * played_.micro_batches + m);
        if (there <= now) {
          can[k] = row;
        } else {
          sooner = there < sooner ? there : sooner;
        }
      }
    }
    int const before = flying < few ? 0 : 1;
    if (can[2] >= 0 && left >= phase.left) return can[2];
    for (int k : {before, 1 - before, 2}) {
      if (can[k] >= 0) return can[k];
    }
    wakes_.data[rank] = sooner;
    return -1;
  }

  constexpr void take(int rank, int row, double now) {
    int const a = row * played_.micro_batches + next_.data[row]++;
    int const k = row / played_.stages;
    held_.data[rank] += played_.change_of(row, memory_);
    in_flight_.data[rank] += k == 0 ? 1 : k == 1 ? -1 : 0;
    played_.order.data[filled_.data[rank]++] = a;
    int const time = played_.time_of.data[a];
    if (now < begun_.data[rank]) begun_.data[rank] = now;
    left_.data[rank] -= played_.lasts.data[time];
    end_.data[a] = now + played_.lasts.data[time];
    wakes_.data[rank] = free_.data[rank] = end_.data[a] + played_.post.data[time];
    int const step = played_.feeds.data[row];
    if (step == 0) return;
    int const other = played_.rank_of.data[played_.row_of.data[a + step]];
    if (other == rank) return;
    double const there = end_.data[a] + played_.lag.data[played_.time_of.data[a + step]];
    double const wakes = there > free_.data[other] ? there : free_.data[other];
    if (wakes < wakes_.data[other]) wakes_.data[other] = wakes;
  }

  replay& played_;
  activation_limit memory_;
  int all_;
  buffer<double> end_;
  buffer<int> next_;  // by row: how many were taken
  buffer<int> stages_begin_;
  buffer<int> stages_;
  buffer<int> filled_;
  buffer<double> free_;
  buffer<double> wakes_;
  buffer<double> held_;
  buffer<double> in_flight_;  // from F to I
  buffer<double> work_;
  buffer<double> left_;  // of the work
  buffer<double> begun_;
};

/// W wait for an occasion, however many are left.
inline constexpr double never_left = 1e9;

/// The shortest of orders by drawn rules, in rounds, after a fifth of each drawn near its best ones; without actions if there is none.
/// Backwards must be split.
/// \param trials a rule is drawn for every five: 20 to 40,000 in all, fewer where there are many actions
constexpr plan eager_start(plan const& like, cost_view const& costs, activation_limit memory, objective goal, std::uint64_t seed,
                           int trials, double bound, watched& watch) {
  constexpr int kept = 20;
  constexpr int rounds = 8;  // some end where nothing near is better
  replay played(like, costs, goal);
  eager_order orders(played, memory);
  random_numbers random(seed);
  int const by_size = 64'000'000 / played.total;
  int const by_trials = trials / 5 < 40'000 ? trials / 5 : 40'000;
  int const wanted = by_size < by_trials ? by_size : by_trials;
  int const draws = wanted < 20 ? 20 : wanted;
  int const per_round = draws / rounds + 1;
  double const all = static_cast<double>(like.size.micro_batches) * like.stages / like.size.ranks;
  double const limit = memory.most > 0 && memory.most < all ? memory.most : all;
  eager_rule best[kept]{};
  double lengths[kept]{};
  int count = 0;
  plan made;
  made.size = like.size;
  double shortest = -1;
  for (int draw = 0; draw < draws && !watch.stop(); ++draw) {
    if (shortest >= 0 && shortest <= bound * (1 + 1e-12)) break;
    int const of_round = draw % per_round;
    if (of_round == 0) count = 0;
    eager_rule rule{};
    if (of_round < per_round / 5 || count == 0) {
      for (eager_phase& phase : rule.phases) {
        for (double& few : phase.few) few = limit * random.share();
        for (double& most : phase.most) most = 4 + (limit - 3) * random.share();
        phase.left = random.coin() ? never_left : 1 + limit * random.share();
      }
      for (double& turn : rule.turns) turn = random.share();
      if (rule.turns[0] > rule.turns[1]) std::swap(rule.turns[0], rule.turns[1]);
      rule.most_early = random.coin() ? 1 : .5 + .5 * random.share();
      for (bool& late : rule.late) late = random.coin();
    } else {
      rule = best[random.below(count)];
      auto const near = [&](double& value, double by) {
        if (random.below(4) == 0) value += by * (2 * random.share() - 1);
      };
      for (eager_phase& phase : rule.phases) {
        for (double& few : phase.few) near(few, 6);
        for (double& most : phase.most) near(most, 6);
        if (phase.left < never_left) near(phase.left, 6);
      }
      for (double& turn : rule.turns) near(turn, .2);
      for (bool& late : rule.late) late = random.below(6) == 0 ? !late : late;
    }
    if (!orders.make(rule, count < kept ? never : lengths[count - 1]) || !played.play()) continue;
    double const length = played.length();
    if (shortest < 0 || length < shortest) {
      shortest = length;
      if (made.actions.count == 0) made = copy_of(like);
      made.name = "an eager order";
      played.write_to(made);
    }
    int at = count < kept ? count++ : kept;
    for (; at > 0 && lengths[at - 1] > length; --at) {
      if (at == kept) continue;
      lengths[at] = lengths[at - 1];
      best[at] = best[at - 1];
    }
    if (at == kept) continue;
    lengths[at] = length;
    best[at] = rule;
  }
  return made;
}

}  // namespace chevron::search::detail
