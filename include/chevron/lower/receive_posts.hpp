#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// When the receives of a program are posted.

namespace chevron::detail {

/// Which rank takes what a stage makes: its activations, and its gradients; -1 where no other rank does.
struct receivers {
  int of_activation;
  int of_gradient;

  constexpr int of(kind what) const { return what == kind::forward ? of_activation : hands_on(what) ? of_gradient : -1; }
};
constexpr receivers receivers_of(plan_view const& plan, int stage) {
  int const here = plan.rank_of[stage];
  int const after = stage + 1 < plan.stages ? plan.rank_of[stage + 1] : here;
  int const before = stage > 0 ? plan.rank_of[stage - 1] : here;
  return {after == here ? -1 : after, before == here ? -1 : before};
}

/// Before which action each message's receive is posted. Messages are numbered by their producer, cell by cell (a stage's
/// microbatches in a row): forwards from 0, gradients behind them.
struct receive_posts {
  buffer<receivers> of_stage;
  buffer<int> forward_at, gradient_at;  ///< by cell, where on its rank it runs forward and passes its gradient on
  buffer<int> posted_at;                ///< by message, in its receiver's list
  buffer<int> first;                    ///< by action, a message whose receive is posted before it, 1-based; 0: none
  buffer<int> next;                     ///< by message, a further one that is posted before the same action

  constexpr receive_posts(plan_view const& plan, int cells)
      : of_stage(plan.stages),
        forward_at(cells),
        gradient_at(cells),
        posted_at(2 * cells),
        first(plan.total(), zeroed),
        next(2 * cells) {
    for (int s = 0; s < plan.stages; ++s) of_stage.data[s] = receivers_of(plan, s);
    for (int r = 0; r < plan.size.ranks; ++r) note_positions(plan, plan.begin[r], plan.begin[r + 1]);
    buffer<int> earliest_use(plan.size.ranks);
    for (int r = 0; r < plan.size.ranks; ++r) post_for(plan, r, cells, earliest_use.data);
  }

 private:
  constexpr void note_positions(plan_view const& plan, int begin, int end) {
    int const micro_batches = plan.size.units();
    for (int i = begin; i < end; ++i) {
      action const a = plan.actions[i];
      int const cell = static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch);
      if (a.kind == kind::forward) forward_at.data[cell] = i - begin;
      if (makes_input_gradient(a.kind)) gradient_at.data[cell] = i - begin;
    }
  }

  /// Goes through a sender's list from its end: the latest moment for a receive is the earliest use of it or of any later message
  /// on the edge.
  /// \param earliest_use room for one entry a rank
  constexpr void post_for(plan_view const& plan, int sender, int cells, int* const earliest_use) {
    constexpr int ahead = 1;
    int const micro_batches = plan.size.units();
    action const* const actions = plan.actions;
    receivers const* const to = of_stage.data;
    int* const bucket = first.data;
    for (int r = 0; r < plan.size.ranks; ++r) earliest_use[r] = plan.begin[r + 1] - plan.begin[r];
    for (int i = plan.begin[sender + 1] - 1; i >= plan.begin[sender]; --i) {
      int const receiver = to[actions[i].stage].of(actions[i].kind);
      if (receiver < 0) continue;
      int const cell = static_cast<int>(actions[i].stage) * micro_batches + static_cast<int>(actions[i].micro_batch);
      bool const goes_forward = actions[i].kind == kind::forward;
      int const message = goes_forward ? cell : cells + cell;
      int use = goes_forward ? forward_at.data[cell + micro_batches] : gradient_at.data[cell - micro_batches];
      int const begin_there = plan.begin[receiver];
      if (use > 0 && actions[begin_there + use - 1].fused != 0) --use;  // a pair starts with its first half
      if (use < earliest_use[receiver]) earliest_use[receiver] = use;
      int post = earliest_use[receiver] > ahead ? earliest_use[receiver] - ahead : 0;
      if (post > 0 && actions[begin_there + post - 1].fused != 0) --post;  // nothing comes between the halves
      posted_at.data[message] = post;
      next.data[message] = bucket[begin_there + post];
      bucket[begin_there + post] = message + 1;
    }
  }
};

}  // namespace chevron::detail
