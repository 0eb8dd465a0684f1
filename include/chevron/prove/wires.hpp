#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Numbers the wires between ranks: costs belong to boundaries between stages, and messages of several boundaries may share a
/// wire.

namespace chevron::detail {

/// The wires of a plan's messages, numbered from 0: one from each rank to each rank that it sends to; none unless transfers
/// occupy wires. One rank sends all messages of a wire, in the order of the rank's actions.
struct wires {
  int count = 0;

  constexpr wires(plan_view const& plan, cost_view const& costs)
      : stages_(plan.stages), number_(costs.occupies_wire() ? 2 * plan.stages : 0) {
    if (!costs.occupies_wire()) return;
    // By rank, a linked list of the first message on each of its wires. The lists are short, since a rank sends to few other
    // ranks.
    buffer<int> newest(plan.size.ranks), older(2 * stages_);
    for (int r = 0; r < plan.size.ranks; ++r) newest.data[r] = -1;
    auto const sender = [&](int i) { return plan.rank_of[i < stages_ ? i : i - stages_ + 1]; };
    auto const receiver = [&](int i) { return plan.rank_of[i < stages_ ? i + 1 : i - stages_]; };
    for (int i = 0; i < 2 * stages_; ++i) {
      number_.data[i] = -1;
      if (i % stages_ + 1 == stages_ || sender(i) == receiver(i) || (i >= stages_ && plan.forward_only)) continue;
      int like = newest.data[sender(i)];
      while (like >= 0 && receiver(like) != receiver(i)) like = older.data[like];
      if (like >= 0) {
        number_.data[i] = number_.data[like];
        continue;
      }
      number_.data[i] = count++;
      older.data[i] = newest.data[sender(i)];
      newest.data[sender(i)] = i;
    }
  }
  /// The wire that carries messages across a boundary between stages, forwards or backwards; -1: both stages are on one rank.
  constexpr int carrying(int boundary, bool forwards) const { return number_.data[forwards ? boundary : stages_ + boundary]; }

 private:
  int stages_;
  buffer<int> number_;
};

}  // namespace chevron::detail
