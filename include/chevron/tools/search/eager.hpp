#pragma once

#include <utility>

#include <chevron/describe/sized.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/prove/dispatch.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/problem/random.hpp>
#include <chevron/tools/search/replay.hpp>

/// \file
/// Makes orders in which no rank waits while one of its actions is ready. With plentiful memory, a search by span starts from
/// these.

namespace chevron::search::detail {

/// The rule by which a rank chooses among its ready actions in one part of the step. `few` and `most` have a number for the
/// first and for the last rank; numbers for ranks in between are interpolated.
struct eager_phase {
  double few[2];   ///< with fewer microbatches than this between F and I, F goes first, otherwise I
  double most[2];  ///< with this many microbatches in flight the rank runs no F
  double left;     ///< with this many W left to do, W goes first; otherwise W is the last choice
};

/// The rule by which a rank chooses in all parts of a step: in the first part it must run many forwards, in the last it must
/// have W's left for times without other ready actions.
struct eager_rule {
  static constexpr int parts = 3;
  eager_phase phases[parts];
  double turns[parts - 1];  ///< share of the F of a rank's first stage after which the rank is in the next part
  double most_early;        ///< the share of `most` that F of the first half of the stages may use
  bool late[3];             ///< by kind: whether a rank prefers its later stages
};

using chevron::detail::never;

/// Makes an order by an `eager_rule`. (Schedules without needless waits are called "non-delay": Baker, Introduction to Sequencing
/// and Scheduling, 1974.)
class eager_order {
 public:
  /// \param played a replay of an order with split backwards; `make` replaces the order
  constexpr eager_order(replay& played, activation_limit memory)
      : played_(played),
        memory_(memory),
        placed_(played.ranks, played.stages, played.rank_of.data),
        work_(played.ranks, zeroed),
        come_(played.ranks) {
    for (int a = 0; a < played.total; ++a) {
      work_.data[played.rank_of.data[played.row_of.data[a]]] += played.lasts.data[played.time_of.data[a]];
    }
  }

  /// Replaces the replay's order by the order that the rule gives. \returns false if ranks wait for each other for ever, or if
  /// the span exceeds `longest`
  constexpr bool make(eager_rule const& rule, double longest) {
    rule_ = &rule;
    longest_ = longest;
    for (int r = 0; r < played_.ranks; ++r) come_.data[r] = {played_.begin.data[r], 0, 0, never, work_.data[r]};
    return chevron::detail::dispatch(played_, *this);
  }

  /// This class is a policy of `dispatch`, which calls the following members.
  constexpr int take(int rank, double now, double const* ready, int const* taken, double& until) {
    int const row = choose(rank, now, ready, taken, until);
    if (row == chevron::detail::sleeps) return row;
    int const number_taken = number(row, taken[row]);
    int const time = played_.time_of.data[number_taken];
    progress& come = come_.data[rank];
    come.held += played_.change_of(row, memory_);
    come.in_flight += row < played_.stages ? 1 : row < 2 * played_.stages ? -1 : 0;
    played_.order.data[come.filled++] = number_taken;
    come.begun = now < come.begun ? now : come.begun;
    come.left -= played_.lasts.data[time];
    double const end = now + played_.lasts.data[time];
    return end - come.begun + come.left > longest_ ? chevron::detail::gives_up : row;
  }

  constexpr int number(int row, int k) const {
    return row * played_.micro_batches + (row < played_.stages || played_.slices == 1 ? k : mirrored(k, played_.slices));
  }
  constexpr double free_again(int number, double, double end) const {
    return end + played_.post.data[played_.time_of.data[number]];
  }

 private:
  constexpr int choose(int rank, double now, double const* ready, int const* taken, double& until) const {
    int const* const stages = placed_.stage.data + placed_.first.data[rank];
    int const count = placed_.held(rank);
    double const entered = count > 0 ? taken[stages[0]] : 0;
    int in = 0;
    while (in < eager_rule::parts - 1 && entered >= rule_->turns[in] * played_.micro_batches) ++in;
    eager_phase const& phase = rule_->phases[in];
    double const part = played_.ranks > 1 ? static_cast<double>(rank) / (played_.ranks - 1) : 0;
    double const few = phase.few[0] + (phase.few[1] - phase.few[0]) * part;
    double const most = phase.most[0] + (phase.most[1] - phase.most[0]) * part;
    double const flying = come_.data[rank].in_flight;
    int left = 0;  // number of the rank's W's left to do
    int can[3] = {-1, -1, -1};
    for (int k = 0; k < 3; ++k) {
      for (int i = 0; i < count; ++i) {
        int const stage = stages[rule_->late[k] ? count - 1 - i : i];
        int const row = k * played_.stages + stage;
        if (k == 2) left += taken[row - played_.stages] - taken[row];
        if (can[k] >= 0) continue;
        if (k == 0) {
          double const room = 2 * stage < played_.stages ? most * rule_->most_early : most;
          bool const full = memory_.most > 0 && come_.data[rank].held + 1 > memory_.most + activation_limit::rounding;
          if (full || (flying > 0 && flying >= room)) continue;  // no F now; a W may free memory
        }
        if (ready[row] <= now) {
          can[k] = row;
        } else {
          until = ready[row] < until ? ready[row] : until;
        }
      }
    }
    int const before = flying < few ? 0 : 1;
    if (can[2] >= 0 && left >= phase.left) return can[2];
    for (int k : {before, 1 - before, 2}) {
      if (can[k] >= 0) return can[k];
    }
    return chevron::detail::sleeps;
  }

  struct progress {
    int filled;
    double held, in_flight;  // chunks in memory, and chunks between F and I
    double begun, left;      // the time of the rank's first start, and its work left to do
  };

  replay& played_;
  activation_limit memory_;
  chevron::detail::stages_by_rank placed_;
  buffer<double> work_;  // by rank: the sum of its actions' durations
  buffer<progress> come_;
  eager_rule const* rule_ = nullptr;
  double longest_ = never;
};

/// A value of `left` that no number of W's reaches: ranks run W's only when they would idle.
inline constexpr double never_left = 1e9;

/// Draws rules at random and returns the shortest of their orders; a plan without actions if no rule gives an order. Rules are
/// drawn in rounds: a fifth of each round over the whole range, the others near the round's best rules so far. Backwards must
/// be split.
/// \param how_hard one rule is drawn for every five trials: 20 to 40,000 in all, fewer if plans have many actions
constexpr plan eager_start(plan const& like, problem const& asked, effort const& how_hard, double bound, watched& watch) {
  constexpr int kept = 20;
  constexpr int rounds = 8;  // each round begins without the best rules of the round before
  replay played(like, asked.costs, asked.goal);
  eager_order orders(played, asked.memory);
  random_numbers random(how_hard.seed);
  int const by_size = 64'000'000 / played.total;
  int const by_trials = how_hard.trials / 5 < 40'000 ? how_hard.trials / 5 : 40'000;
  int const wanted = by_size < by_trials ? by_size : by_trials;
  int const draws = wanted < 20 ? 20 : wanted;
  int const per_round = draws / rounds + 1;
  double const all = static_cast<double>(like.size.units()) * like.stages / like.size.ranks;
  double const limit = asked.memory.most > 0 && asked.memory.most < all ? asked.memory.most : all;
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
