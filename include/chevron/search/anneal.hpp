#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/search/objective.hpp>

/// \file
/// Local search: one order, changed action by action where it decides how long the step is.

namespace chevron::search::detail {

/// The same numbers for the same seed on every machine (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
class random_numbers {
 public:
  constexpr explicit random_numbers(std::uint64_t seed) : state_(seed) {}

  constexpr std::uint64_t next() {
    std::uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }
  constexpr int below(int count) { return static_cast<int>(next() % static_cast<std::uint64_t>(count)); }
  constexpr bool coin() { return (next() & 1) != 0; }
  /// From 0 up to 1.
  constexpr double share() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// Rounding in sums of what chunks hold.
inline constexpr double held_rounding = 1e-9;

/// By how much an action changes what its rank holds, in chunks whose backward has not begun.
constexpr double held_change(kind what, activation_limit const& memory) {
  if (what == kind::forward) return 1;
  if (what == kind::backward) return -1;
  return what == kind::backward_input ? memory.kept_for_weight - 1 : -memory.kept_for_weight;
}

/// Whether actions [from, to) of one rank, run from empty, keep the limit.
constexpr bool keeps(activation_limit const& memory, action const* actions, int from, int to) {
  if (!(memory.most > 0)) return true;
  double held = 0;
  for (int i = from; i < to; ++i) {
    held += held_change(actions[i].kind, memory);
    if (held > memory.most + held_rounding) return false;
  }
  return true;
}

constexpr bool keeps(activation_limit const& memory, plan_view const& plan) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (!keeps(memory, plan.actions, plan.begin[r], plan.begin[r + 1])) return false;
  }
  return true;
}

/// Simulated annealing of one order. A trial takes an action on a critical path and puts it elsewhere in its rank's list; what
/// became longer is kept if it is not much longer, and less and less of that towards the end. (Only such moves can shorten a
/// step: van Laarhoven, Aarts and Lenstra, Operations Research 40(1), 1992.) The order must be lawful, hold no fused pairs, and
/// keep the limit.
class annealing {
 public:
  constexpr annealing(plan_view const& start, cost_view const& costs, activation_limit memory, objective goal, std::uint64_t seed)
      : seen_(start),
        costs_(costs),
        memory_(memory),
        goal_(goal),
        random_(seed),
        order_(start.total()),
        best_order_(start.total()),
        maker_(2 * start.stages * start.size.micro_batches),
        path_(start.total()) {
    for (int i = 0; i < start.total(); ++i) best_order_.data[i] = order_.data[i] = start.actions[i];
    seen_.actions = order_.data;
    note_makers(0, start.total());
    when_ = simulate(seen_, costs_);
    now_ = best_ = judge(when_);
    find_path();
    for (int s = 0; s < start.stages; ++s) {
      for (kind k : {kind::forward, kind::backward_input, kind::backward_weight}) {
        double const one = costs_.of(k, s);
        longest_action_ = one > longest_action_ ? one : longest_action_;
      }
    }
  }

  /// Runs trials while the best is longer than `bound`; gives how many.
  constexpr int run(int trials, double bound) {
    double const hottest = longest_action_ * temperature;
    for (int trial = 0; trial < trials; ++trial) {
      if (best_.length <= bound * (1 + 1e-12)) return trial;
      try_one(hottest * (trials - trial) / trials);
    }
    return trials;
  }

  constexpr double best_length() const { return best_.length; }
  constexpr action const* best_order() const { return best_order_.data; }

 private:
  // Found by trying, over placements, limits and costs: hotter is slower, colder gets stuck.
  static constexpr double temperature = 0.25;
  static constexpr double weight_of_mean = 0.05;
  static constexpr int near = 4;
  static constexpr int far = 40;

  /// How good an order is: its length, and a little of what all ranks take on average, so that a step towards a shorter length
  /// counts before the length itself is shorter.
  struct merit {
    double length = 0;
    double energy = 0;
  };

  constexpr merit judge(timeline const& when) const {
    merit out;
    int const ranks = seen_.size.ranks;
    double sum = 0;
    for (int r = 0; r < ranks; ++r) {
      double const one = length_of_rank(when, r);
      out.length = one > out.length ? one : out.length;
      sum += one;
    }
    out.energy = out.length + weight_of_mean * sum / ranks;
    return out;
  }
  constexpr double length_of_rank(timeline const& when, int rank) const {
    if (goal_ == objective::span) return span_of_rank(seen_, when, rank);
    int const last = seen_.begin[rank + 1] - 1;
    return last >= seen_.begin[rank] ? when.end.data[last] : 0;
  }
  constexpr int cell_of(action a) const {
    return static_cast<int>(a.stage) * seen_.size.micro_batches + static_cast<int>(a.micro_batch);
  }
  constexpr void note_makers(int from, int to) {
    int const cells = seen_.stages * seen_.size.micro_batches;
    for (int i = from; i < to; ++i) {
      action const a = order_.data[i];
      if (a.kind != kind::backward_weight) maker_.data[a.kind == kind::forward ? cell_of(a) : cells + cell_of(a)] = i;
    }
  }

  /// One chain of actions that makes the longest rank so long; where several do, any of them.
  constexpr void find_path() {
    int const cells = seen_.stages * seen_.size.micro_batches;
    double const same = longest_action_ * 1e-9;
    int at = -1;
    int equals = 0;
    double longest = -1;
    for (int r = 0; r < seen_.size.ranks; ++r) {
      if (seen_.length(r) == 0) continue;
      double const one = length_of_rank(when_, r);
      if (one > longest + same) equals = 0;
      if (one < longest - same || (++equals > 1 && random_.below(equals) != 0)) continue;
      longest = one > longest ? one : longest;
      at = seen_.begin[r + 1] - 1;
    }
    path_count_ = 0;
    while (at >= 0) {
      path_.data[path_count_++] = at;
      action const a = order_.data[at];
      int const rank = seen_.rank_of[a.stage];
      bool const alone = at == seen_.begin[rank];
      int cause = alone ? -1 : at - 1;
      if (int const boundary = boundary_received(seen_, a); boundary >= 0) {
        int const micro_batches = seen_.size.micro_batches;
        int const producer =
            a.kind == kind::forward ? maker_.data[cell_of(a) - micro_batches] : maker_.data[cells + cell_of(a) + micro_batches];
        double const later = when_.end.data[producer] + costs_.of_message(boundary) - (alone ? 0 : when_.end.data[at - 1]);
        if (alone || later > same || (later > -same && random_.coin())) cause = producer;
      }
      at = cause;
    }
  }

  /// Moves the action at `from` to `to` in its rank's list; the ones between make way.
  constexpr void shift(int from, int to) {
    action const moved = order_.data[from];
    int const step = to > from ? 1 : -1;
    for (int i = from; i != to; i += step) order_.data[i] = order_.data[i + step];
    order_.data[to] = moved;
    note_makers(from < to ? from : to, (from < to ? to : from) + 1);
  }

  constexpr void try_one(double hot) {
    int const from = path_.data[random_.below(path_count_)];
    action const moved = order_.data[from];
    int const rank = seen_.rank_of[moved.stage];
    int const distance = random_.coin() ? 1 : 1 + random_.below(random_.below(4) != 0 ? near : far);
    int const to = random_.coin() ? from - distance : from + distance;
    if (to < seen_.begin[rank] || to >= seen_.begin[rank + 1]) return;
    // Microbatches keep their order in each kind of a stage, each its F before its backward; all else may be passed.
    for (int i = from < to ? from + 1 : to; i < (from < to ? to + 1 : from); ++i) {
      action const other = order_.data[i];
      if (other.stage == moved.stage && (other.kind == moved.kind || other.micro_batch == moved.micro_batch)) return;
    }
    shift(from, to);
    if (keeps(memory_, order_.data, seen_.begin[rank], seen_.begin[rank + 1])) {
      timeline candidate = simulate(seen_, costs_);
      merit const then = judge(candidate);
      double const chance = random_.share();
      if (candidate.complete && then.energy <= now_.energy + hot * 3 * chance * chance) {
        when_ = static_cast<timeline&&>(candidate);
        now_ = then;
        find_path();
        if (now_.length < best_.length) {
          best_ = now_;
          for (int i = 0; i < order_.count; ++i) best_order_.data[i] = order_.data[i];
        }
        return;
      }
    }
    shift(to, from);
  }

  plan_view seen_;
  cost_view costs_;
  activation_limit memory_;
  objective goal_;
  random_numbers random_;
  buffer<action> order_;
  buffer<action> best_order_;
  buffer<int> maker_;  // who made a cell: outputs first, then input gradients
  buffer<int> path_;
  int path_count_ = 0;
  timeline when_;
  merit now_;
  merit best_;
  double longest_action_ = 0;
};

}  // namespace chevron::search::detail
