#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/tools/search/problem/problem.hpp>

/// \file
/// The actions of a step with durations in whole units of time, and the pairs of actions whose order is the same in every plan.

namespace chevron::detail {

/// Time in whole units, so that no conclusion depends on rounding.
using whole_time = std::int64_t;

/// A step in which each stage runs the microbatches of a kind in ascending order. Chain c = stage * kinds + kind consists of
/// the actions of one kind of one stage; its m-th action has the number c * micro_batches + m. Times are rounded down, so a
/// plan never takes longer with these times than with its costs.
class integer_durations {
 public:
  struct edge {
    int to;            ///< the action that comes later
    whole_time delay;  ///< least time from the end of the earlier action to the start of the later one
  };

  int ranks = 0, stages = 0, micro_batches = 0;
  int kinds = 3;                  ///< 3: F, I and W of a stage; 2: F and a whole B, which is called I here
  int count = 0;                  ///< number of actions
  std::vector<int> rank_of;       ///< by action: its rank
  std::vector<whole_time> takes;  ///< by action: its duration
  std::vector<int> first;         ///< edges that begin at action i: [first[i], first[i + 1])
  std::vector<edge> edges;
  std::vector<int> sorted;       ///< all actions, each after those that must come before it
  std::vector<int> first_stage;  ///< by rank: its first stage; -1: none
  std::vector<int> stages_on;    ///< by rank: the number of its stages
  bool limited = false;
  double most = 0, kept_for_weight = 1;  ///< the memory limit
  whole_time rounding = 0;               ///< by how much a length may have been rounded down
  bool usable = true;

  /// \param asked the problem; if backwards are not split, with costs by `unsplit`: a B is an I without a W
  /// \param longest a length, which sets the unit: it becomes 2^52 units or up to twice as many
  integer_durations(search::problem const& asked, double longest)
      : ranks(asked.where.size.ranks),
        stages(asked.where.stages),
        micro_batches(asked.where.size.units()),
        kinds(asked.split() ? 3 : 2),
        count(stages * kinds * micro_batches),
        first_stage(static_cast<std::size_t>(ranks), -1),
        stages_on(static_cast<std::size_t>(ranks), 0),
        kept_for_weight(asked.memory.kept_for_weight),
        shift_(52 - std::ilogb(longest)) {
    plan_view const placed = asked.where;
    cost_view const& costs = asked.costs;
    activation_limit const& memory = asked.memory;
    for (int s = stages - 1; s >= 0; --s) {
      first_stage[at(placed.rank_of[s])] = s;
      ++stages_on[at(placed.rank_of[s])];
    }
    for (int const one : stages_on) usable = usable && one * kinds <= most_chains;
    step_graph const graph(placed);
    for (int i = 0; i < count; ++i) {
      action const a = make_action(kind_of_family(kind_of_chain(chain_of(i)), true), chain_of(i) / kinds, i % micro_batches);
      rank_of.push_back(placed.rank_of[a.stage]);
      takes.push_back(units(costs.of_action(a)));
    }
    for (int s = 0; s < stages; ++s) {
      for (int m = 0; m < micro_batches; ++m) {
        for (int k = 0; k < kinds; ++k) {
          action const a = make_action(kind_of_family(k, true), s, m);
          int const boundary = graph.crosses(a);
          if (int const to = graph.to(a); to >= 0)
            add(id(s, k, m), id(to, k, m), boundary < 0 ? 0 : units(costs.of_delay(boundary, m)));
          if (k + 1 < kinds) add(id(s, k, m), id(s, k + 1, m));
          if (m > 0) add(id(s, k, m - 1), id(s, k, m));
        }
      }
    }
    double const all = static_cast<double>(micro_batches) * placed.size.chunks;
    limited = memory.most > 0 && memory.most < all;
    most = memory.most + activation_limit::rounding;
    if (limited) add_memory(placed, asked.split());
    if (!exact_) rounding = 2 * static_cast<whole_time>(count) + 8;
    connect();
  }

  int id(int stage, int kind_of, int m) const { return (stage * kinds + kind_of) * micro_batches + m; }
  int forward(int stage, int m) const { return id(stage, 0, m); }
  int input(int stage, int m) const { return id(stage, 1, m); }
  int weight(int stage, int m) const { return id(stage, 2, m); }
  int chain_of(int action) const { return action / micro_batches; }
  int chains() const { return stages * kinds; }
  /// 0: F, 1: I or B, 2: W.
  int kind_of_chain(int chain) const { return chain % kinds; }
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  /// Converts a time to units, rounded down. The sum of all times that are converted may reach 2^60, so no sum overflows.
  whole_time units(double time) {
    double const exact = std::ldexp(time, shift_);
    sum_ += exact;
    usable = usable && exact >= 0 && sum_ <= 0x1p60;
    if (!usable) return 0;
    double const whole = std::floor(exact);
    exact_ = exact_ && whole == exact;
    return static_cast<whole_time>(whole);
  }
  double time_of(whole_time units) const { return std::ldexp(static_cast<double>(units), -shift_); }

  /// Adds a pair of actions of which `to` must start at least `delay` after `from` ends. To be followed by `connect`.
  void add(int from, int to, whole_time delay = 0) { given_.push_back({from, to, delay}); }
  /// Lets a rank begin no earlier than the arrival of microbatch m at its first stage, `stage`.
  void begin_with(int stage, int m) {
    for (given const& g : given_) {
      if (g.from != forward(stage - 1, 0) || g.to != forward(stage, 0)) continue;
      add(forward(stage - 1, m), g.to, g.delay);
      return;
    }
  }
  /// Computes `edges` and `sorted`. If pairs form a cycle, sets `circular`, and the object is of no further use.
  void connect() {
    first.assign(at(count) + 1, 0);
    for (given const& g : given_) ++first[at(g.from) + 1];
    for (int i = 0; i < count; ++i) first[at(i) + 1] += first[at(i)];
    edges.resize(given_.size());
    std::vector<int> next(first.begin(), first.end() - 1), waits(at(count), 0);
    for (given const& g : given_) {
      edges[at(next[at(g.from)]++)] = {g.to, g.delay};
      ++waits[at(g.to)];
    }
    sorted.clear();
    for (int i = 0; i < count; ++i) {
      if (waits[at(i)] == 0) sorted.push_back(i);
    }
    for (std::size_t done = 0; done < sorted.size(); ++done) {
      int const i = sorted[done];
      for (int e = first[at(i)]; e < first[at(i) + 1]; ++e) {
        if (--waits[at(edges[at(e)].to)] == 0) sorted.push_back(edges[at(e)].to);
      }
    }
    circular = static_cast<int>(sorted.size()) < count;
  }
  bool circular = false;  ///< some actions wait for each other in a cycle: no order exists

 private:
  struct given {
    int from, to;
    whole_time delay;
  };
  static constexpr int most_chains = 64;  // chains on a rank, at most: sets of chains have one bit for each

  /// Adds pairs that follow from the memory limit. When F of a stage begins for microbatch m, j stages of the rank, up to this
  /// stage, have begun m + 1 microbatches each. A microbatch whose I of this stage is not done occupies all j stages, so m + 1
  /// less the I's done is at most most / j. If all earlier microbatches are done up to their W, j (m + 1) - j m (1 - kept) -
  /// kept * (W's done) is at most `most`; so each of the j stages has done at least m - (most - j) / kept of its W's.
  void add_memory(plan_view const& placed, bool split) {
    for (int s = 0; s < stages; ++s) {
      int nested = 0;
      for (int t = 0; t <= s; ++t) nested += placed.rank_of[t] == placed.rank_of[s] ? 1 : 0;
      int const places = static_cast<int>(most / nested);
      double const left = (most - nested) / kept_for_weight;
      for (int m = places; m < micro_batches; ++m) add(input(s, m - places), forward(s, m));
      if (!split || left < 0 || left >= micro_batches) continue;
      for (int m = static_cast<int>(left) + 1; m < micro_batches; ++m) {
        for (int t = 0; t <= s; ++t) {
          if (placed.rank_of[t] == placed.rank_of[s]) add(weight(t, m - static_cast<int>(left) - 1), forward(s, m));
        }
      }
    }
  }

  int shift_;
  bool exact_ = true;
  double sum_ = 0;
  std::vector<given> given_;
};

}  // namespace chevron::detail
