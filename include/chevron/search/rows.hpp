#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/factors.hpp>
#include <chevron/search/held.hpp>

/// \file
/// Actions as numbers, and what each kind of a stage takes and needs.

namespace chevron::search::detail {

/// An action is a number: row · microbatches + microbatch; a row is a kind of a stage, kind · stages + stage, the kinds being F, I
/// (or B) and W. Occupied ranks and messages become part of a row's times.
/// Wires do not: messages count as if they found theirs free. Where microbatches are of unequal length, each action has times of its
/// own behind those of the rows, which are then of the mean.
struct rows {
  /// \param from says where stages live and, by its actions, whether backwards are split
  constexpr rows(plan_view const& from, cost_view const& costs)
      : ranks(from.size.ranks),
        stages(from.stages),
        micro_batches(from.size.micro_batches),
        rank_of(3 * stages),
        lasts(times_of(costs)),
        before(times_of(costs)),
        post(times_of(costs)),
        lag(times_of(costs)),
        fed_by(3 * stages),
        feeds(3 * stages),
        row_of(3 * stages * micro_batches),
        time_of(3 * stages * micro_batches) {
    whole = true;
    for (int i = 0; i < from.total(); ++i) whole = whole && from.actions[i].kind != kind::backward_weight;
    int const all = stages * micro_batches;
    bool const alike = costs.lengths.alike();
    chevron::detail::mean_factors const mean(costs.lengths, micro_batches);
    for (int s = 0; s < stages; ++s) {
      kind const backward = whole ? kind::backward : kind::backward_input;
      lasts.data[s] = mean.computation * costs.of(kind::forward, s);
      lasts.data[stages + s] = mean.computation * costs.of(backward, s);
      lasts.data[2 * stages + s] = mean.computation * costs.of(kind::backward_weight, s);
      fed_by.data[s] = s > 0 ? -micro_batches : 0;
      fed_by.data[stages + s] = s + 1 < stages ? micro_batches : -all;
      fed_by.data[2 * stages + s] = 0;  // its I stands before it on the same rank
      feeds.data[s] = s + 1 < stages ? micro_batches : all;
      feeds.data[stages + s] = s > 0 ? -micro_batches : 0;
      feeds.data[2 * stages + s] = 0;
      for (int k = 0; k < 3; ++k) {
        rank_of.data[k * stages + s] = from.rank_of[s];
        lag.data[k * stages + s] = post.data[k * stages + s] = before.data[k * stages + s] = 0;
      }
    }
    for (int s = 0; s + 1 < stages; ++s) {
      if (from.rank_of[s] == from.rank_of[s + 1]) continue;
      double const takes = mean.transfer * costs.of_message(s);
      double const latency = costs.of_latency(s);
      int const takers[] = {s + 1, stages + s};
      int const givers[] = {s, stages + s + 1};
      for (int way = 0; way < 2; ++way) {
        if (costs.occupies_receiver()) {
          lasts.data[takers[way]] += takes;
          before.data[takers[way]] = takes;
          lag.data[takers[way]] = latency;
        } else {
          lag.data[takers[way]] = takes + latency;
        }
        if (costs.occupies_sender()) post.data[givers[way]] = takes;
      }
    }
    for (int a = 0; a < row_of.count; ++a) {
      int const row = a / micro_batches;
      row_of.data[a] = static_cast<std::int16_t>(row);
      time_of.data[a] = row;
    }
    if (!alike) give_times(costs);
  }

  constexpr int number_of(action a) const {
    int const k = a.kind == kind::forward ? 0 : a.kind == kind::backward_weight ? 2 : 1;
    return (k * stages + static_cast<int>(a.stage)) * micro_batches + static_cast<int>(a.micro_batch);
  }
  constexpr kind kind_of(int row) const {
    return row < stages ? kind::forward : row >= 2 * stages ? kind::backward_weight : whole ? kind::backward : kind::backward_input;
  }
  constexpr action action_of(int number) const {
    int const row = number / micro_batches;
    return make_action(kind_of(row), row % stages, number % micro_batches);
  }
  /// By how much an action of this row changes what its rank holds.
  constexpr double change_of(int row, activation_limit const& memory) const { return held_change(kind_of(row), memory); }

  constexpr int times_of(cost_view const& costs) const {
    return costs.lengths.alike() ? 3 * stages : 3 * stages * (1 + micro_batches);
  }
  /// To each action its own times.
  constexpr void give_times(cost_view const& costs) {
    for (int a = 0; a < row_of.count; ++a) {
      int const row = row_of.data[a];
      int const m = a - row * micro_batches;
      int const i = time_of.data[a] = 3 * stages + a;
      bool const forward = row < stages;
      int const stage = row % stages;
      bool const moves = row < 2 * stages;
      auto const boundary_to = [&](int other) {  // -1: none
        int const boundary = other < stage ? other : stage;
        bool const crosses = moves && other >= 0 && other < stages && rank_of.data[boundary] != rank_of.data[boundary + 1];
        return crosses ? boundary : -1;
      };
      int const in_over = boundary_to(forward ? stage - 1 : stage + 1);
      int const out_over = boundary_to(forward ? stage + 1 : stage - 1);
      double const in = in_over < 0 ? 0 : costs.of_message(in_over, m);
      double const out = out_over < 0 ? 0 : costs.of_message(out_over, m);
      double const latency = in_over < 0 ? 0 : costs.of_latency(in_over);
      before.data[i] = costs.occupies_receiver() ? in : 0;
      lasts.data[i] = costs.lengths.of_computation(m) * costs.of(kind_of(row), stage) + before.data[i];
      post.data[i] = costs.occupies_sender() ? out : 0;
      lag.data[i] = (costs.occupies_receiver() ? 0 : in) + latency;
    }
  }

  int ranks, stages, micro_batches;
  bool whole = false;  ///< whether backwards are not split
  buffer<int> rank_of;    ///< by row: kind · stages + stage
  // By row and, where microbatches are of unequal length, behind that by action: see `time_of`.
  buffer<double> lasts;   ///< how long, with a message that occupies the receiver before it
  buffer<double> before;  ///< of that, the message
  buffer<double> post;    ///< how long a message then occupies the sender
  buffer<double> lag;     ///< from the end of what it needs until that is there
  buffer<int> fed_by;     ///< by row: from an action's number to that of what it needs; 0: nothing
  buffer<int> feeds;      ///< by row: to that of what needs it; 0: nothing
  buffer<std::int16_t> row_of;  ///< by number
  buffer<int> time_of;          ///< by number: where its times stand
};

}  // namespace chevron::search::detail
