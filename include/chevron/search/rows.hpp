#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/search/held.hpp>

/// \file
/// Actions as numbers, and what each kind of a stage takes and needs.

namespace chevron::search::detail {

/// An action is a number: row · microbatches + microbatch; a row is a kind of a stage, kind · stages + stage, the kinds being F, I
/// (or B) and W. Occupied ranks and messages become part of a row's times.
/// Wires do not: messages count as if they found theirs free.
struct rows {
  /// \param from says where stages live and, by its actions, whether backwards are split
  constexpr rows(plan_view const& from, cost_view const& costs)
      : ranks(from.size.ranks),
        stages(from.stages),
        micro_batches(from.size.micro_batches),
        rank_of(3 * stages),
        lasts(3 * stages),
        before(3 * stages),
        post(3 * stages),
        lag(3 * stages),
        fed_by(3 * stages),
        feeds(3 * stages),
        row_of(3 * stages * micro_batches) {
    whole = true;
    for (int i = 0; i < from.total(); ++i) whole = whole && from.actions[i].kind != kind::backward_weight;
    int const all = stages * micro_batches;
    for (int s = 0; s < stages; ++s) {
      kind const backward = whole ? kind::backward : kind::backward_input;
      lasts.data[s] = costs.of(kind::forward, s);
      lasts.data[stages + s] = costs.of(backward, s);
      lasts.data[2 * stages + s] = costs.of(kind::backward_weight, s);
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
      double const takes = costs.of_message(s);
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
    for (int a = 0; a < row_of.count; ++a) row_of.data[a] = static_cast<std::int16_t>(a / micro_batches);
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

  int ranks, stages, micro_batches;
  bool whole = false;  ///< whether backwards are not split
  buffer<int> rank_of;    ///< by row: kind · stages + stage
  buffer<double> lasts;   ///< by row: how long, with a message that occupies the receiver before it
  buffer<double> before;  ///< by row: of that, the message
  buffer<double> post;    ///< by row: how long a message then occupies the sender
  buffer<double> lag;     ///< by row: from the end of what it needs until that is there
  buffer<int> fed_by;     ///< by row: from an action's number to that of what it needs; 0: nothing
  buffer<int> feeds;      ///< by row: to that of what needs it; 0: nothing
  buffer<std::int16_t> row_of;  ///< by number
};

}  // namespace chevron::search::detail
