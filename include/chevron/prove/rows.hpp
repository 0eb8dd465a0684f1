#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>

/// \file
/// Numbers the actions of a step, and computes durations and inputs for each kind and stage.

namespace chevron::detail {

/// The actions of a step in rows. A row is all actions of one kind on one stage and has the number kind · stages + stage, with
/// the kinds F, I (or B) and W. An action's number is row · microbatches + microbatch, as in `step_graph`. Times include
/// messages that occupy ranks, but no waits for wires: every wire counts as free. If microbatches have unequal lengths, a row's
/// times are means over microbatches, and the times of single actions are stored after those of all rows.
struct rows {
  /// \param from  a plan, for the ranks of its stages
  /// \param split whether backwards are split: three kinds, otherwise two
  constexpr rows(plan_view const& from, bool split, cost_view const& costs)
      : ranks(from.size.ranks),
        stages(from.stages),
        micro_batches(from.size.units()),
        slices(from.size.slices),
        kinds(split ? 3 : 2),
        count(kinds * stages),
        alike(costs.lengths.alike()),
        rank_of(count),
        fed_by(count, zeroed),
        feeds(count, zeroed),
        lasts(times()),
        before(times()),
        post(times()),
        lag(times()) {
    step_graph const graph(from);
    mean_factors const mean(costs.lengths, micro_batches);
    for (int row = 0; row < count; ++row) {
      action const a = action_of(row * micro_batches);
      rank_of.data[row] = from.rank_of[a.stage];
      set_times(row, a, graph, costs, mean_time(a, costs, mean), mean.transfer);
      int const source = graph.source_of(a);
      if (source < 0 || graph.makes(a) == step_graph::none) continue;
      fed_by.data[row] = source - row * micro_batches;
      feeds.data[source / micro_batches] = -fed_by.data[row];
    }
    for (int i = count; i < lasts.count; ++i) {
      action const a = action_of(i - count);
      int const m = static_cast<int>(a.micro_batch);
      set_times(i, a, graph, costs, costs.of_action(a), costs.lengths.of_transfer(m));
    }
  }

  constexpr int family_at(int row) const { return row < stages ? 0 : row < 2 * stages ? 1 : 2; }
  constexpr kind kind_of(int row) const { return kind_of_family(family_at(row), kinds == 3); }
  constexpr action action_of(int number) const {
    int const row = number / micro_batches;
    return make_action(kind_of(row), row % stages, number % micro_batches);
  }
  /// The index of an action's times in `lasts`, `before`, `post` and `lag`.
  constexpr int time_at(int number) const { return alike ? number / micro_batches : count + number; }

  int ranks, stages;
  int micro_batches;  ///< number of units: microbatches or, with slices, slices of all microbatches
  int slices;         ///< number of slices per microbatch
  int kinds;
  int count;            ///< number of rows
  bool alike;           ///< whether microbatches are of equal length
  buffer<int> rank_of;  ///< by row: the rank of its stage
  buffer<int> fed_by;   ///< by row: number of the input's action minus the action's number; 0: no input from another stage
  buffer<int> feeds;    ///< by row: number of the consumer's action, but not of an I's W, minus the action's number; 0: none
  // By row; if microbatches have unequal lengths, followed by entries by number: see `time_at`.
  buffer<double> lasts;   ///< the duration, including the time for which a message before it occupies the receiver
  buffer<double> before;  ///< the time of the message that `lasts` includes; 0: none
  buffer<double> post;    ///< the time for which a message occupies the sender after the action
  buffer<double> lag;     ///< from the end of the action that computes the input to the input's arrival

 private:
  constexpr int times() const { return alike ? count : count * (1 + micro_batches); }
  /// The mean time, over microbatches, of an action's kind and stage.
  constexpr double mean_time(action a, cost_view const& costs, mean_factors const& mean) const {
    if (costs.lengths.attention == 0) return mean.computation * costs.of(a.kind, static_cast<int>(a.stage));
    double sum = 0;
    for (int m = 0; m < micro_batches; ++m) sum += costs.of_action(make_action(a.kind, static_cast<int>(a.stage), m));
    return sum / micro_batches;
  }
  constexpr void set_times(int at, action a, step_graph const& graph, cost_view const& costs, double computation, double moving) {
    int const in_over = graph.comes_over(a);
    int const out_over = graph.crosses(a);
    double const in = in_over < 0 ? 0 : moving * costs.of_message(in_over);
    bool const waits = costs.occupies_receiver();
    before.data[at] = waits ? in : 0;
    lasts.data[at] = computation + before.data[at];
    post.data[at] = costs.occupies_sender() && out_over >= 0 ? moving * costs.of_message(out_over) : 0;
    lag.data[at] = (waits ? 0 : in) + (in_over < 0 ? 0 : costs.of_latency(in_over));
  }
};

}  // namespace chevron::detail
