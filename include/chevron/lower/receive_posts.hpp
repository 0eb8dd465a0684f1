#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Decides when the receives of a program are posted. An accelerator whose memory is short may begin a posted receive later
/// (`transport::receive_late`).

namespace chevron::detail {

/// The ranks that receive a stage's outputs and its input gradients; -1: no other rank receives them.
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

/// Finds before which action each message's receive is posted. A cell is a (stage, microbatch), numbered stage by stage. An
/// output's message has the number of the cell that computes it; gradients' messages are numbered after all outputs, in the
/// same order.
struct receive_posts {
  buffer<receivers> of_stage;
  buffer<int> forward_at, gradient_at;  ///< by cell, the positions in its rank's list of its F and its B or I
  buffer<int> posted_at;                ///< by message, the position in its receiver's list before which its receive is posted
  buffer<int> first;                    ///< by action, a message whose receive is posted before it, 1-based; 0: none
  buffer<int> next;                     ///< by message, a further one whose receive is posted there, 1-based; 0: none

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

  /// Decides where the receives of one sender's messages are posted, from the end of the sender's list: the latest moment for a
  /// receive is the earliest use of its message or of any later message on the edge.
  /// \param earliest_use scratch memory, one entry a rank
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
      if (use > 0 && actions[begin_there + use - 1].fused != 0) --use;  // a fused pair needs inputs at its first half
      if (use < earliest_use[receiver]) earliest_use[receiver] = use;
      int post = earliest_use[receiver] > ahead ? earliest_use[receiver] - ahead : 0;
      if (post > 0 && actions[begin_there + post - 1].fused != 0) --post;  // no receive between the halves of a pair
      posted_at.data[message] = post;
      next.data[message] = bucket[begin_there + post];
      bucket[begin_there + post] = message + 1;
    }
  }
};

}  // namespace chevron::detail
