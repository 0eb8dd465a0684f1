#pragma once

#include <cstdint>

#include <chevron/plan/plan.hpp>

/// \file
/// Plays a plan once and, in the same sweep, checks every law about actions and their order. Only if a plan does not pass,
/// `check` searches for the fault. A second function checks the order of slices.

namespace chevron::detail {

/// The state of one (stage, microbatch) while a plan is played: its progress, as ascending values, plus a flag if a rank waits
/// for its forward or its gradient. An enum, since enumerators cost constant evaluation nothing.
enum progress : std::uint8_t {
  untouched = 0,
  forward_awaited = 1,
  gradient_awaited = 2,
  forward_done = 4,
  recomputed = 8,     // R has run; B or I has not
  input_done = 12,    // I has run; W has not
  gradient_done = 16  // B, or I and W, have run
};

/// Whether every rank reaches the end of its list, and each action is on its stage's rank, runs after its inputs, and occurs
/// exactly once. The result is also valid for rendezvous sends: a lowered program posts receives before the data is used, in
/// the order of the sends, so a rank is blocked only until the result that it needs has been computed.
///
/// The ranks take turns in a ring. A rank that lacks an input leaves the ring until the action that computes the input has run.
/// With `InTurns` a turn ends after a B or I, so that in most schedules hardly any rank has to wait: this is faster while
/// compiling. Otherwise a turn ends when the rank must wait: this is faster at run time. Both variants return the same result.
///
/// The caller provides the memory, as arrays or as pointers: `state`, stages × units zeros; `next` and `after`, one
/// element per rank. Constant evaluation takes time for each expression, and more for each large number that has not occurred
/// before: hence arrays rather than pointers, locals that are not const (the evaluator converts a const local at each read),
/// neighbouring cells for neighbouring stages, and a single comparison for a cell that no rank waits for.
template <bool InTurns, class Plan, class States, class Positions>
constexpr bool plays_through(Plan const& plan, States& state, Positions& next, Positions& after) {
  int ranks = plan.size.ranks;
  int stages = plan.stages;
  int last_stage = stages - 1;
  int units = plan.size.units();
  bool forward_only = plan.forward_only;
  if (ranks < 1) return stages * units == 0;
  // The number of actions of a complete plan: F and B for each (stage, microbatch), one more for each I with its W, and one
  // more for each R and each own action in the lists. No F, B, I, W or R runs twice, so a plan with this number of actions is
  // complete, except perhaps for own actions.
  int missing = (forward_only ? 1 : 2) * stages * units - (plan.begin[ranks] - plan.begin[0]);
  for (int r = 0; r < ranks; ++r) {
    next[r] = plan.begin[r];
    after[r] = r + 1;
  }
  int previous = ranks - 1;
  after[previous] = 0;
  for (int rank = 0;; rank = after[rank]) {
    int stop = plan.begin[rank + 1];
    int here = -1;  // a stage that is known to be on this rank
    bool stays = false;
    int i = next[rank];
    for (; i < stop && !stays; ++i) {
      action a = plan.actions[i];
      int stage = static_cast<int>(a.stage);
      int micro_batch = static_cast<int>(a.micro_batch);
      if (stage != here) {
        if (stage > last_stage || plan.rank_of[stage] != rank) return false;
        here = stage;
      }
      if (micro_batch >= units) return false;
      int cell = micro_batch * stages + stage;

      if (a.kind == kind::forward) {
        if (a.fused != 0) {
          // Both halves must be able to start.
          if (i + 1 == stop || forward_only) return false;
          action other = plan.actions[i + 1];
          int other_stage = static_cast<int>(other.stage);
          if (other.kind != kind::backward && other.kind != kind::backward_input) return false;
          if (other_stage > last_stage || plan.rank_of[other_stage] != rank) return false;
          if (static_cast<int>(other.micro_batch) >= units) return false;
          int other_cell = static_cast<int>(other.micro_batch) * stages + other_stage;
          if (other_cell == cell) return false;
          if (other_stage < last_stage && state[other_cell + 1] < input_done) {
            state[other_cell + 1] = static_cast<std::uint8_t>(state[other_cell + 1] | gradient_awaited);
            break;
          }
        }
        if (stage > 0 && state[cell - 1] < forward_done) {
          state[cell - 1] = static_cast<std::uint8_t>(state[cell - 1] | forward_awaited);
          break;
        }
        if (state[cell] == untouched) {
          state[cell] = forward_done;
          continue;
        }
        int now = state[cell];
        if (now >= forward_done) return false;
        state[cell] = static_cast<std::uint8_t>((now & gradient_awaited) | forward_done);
        if ((now & forward_awaited) == 0) continue;
        ++stage;  // the stage whose rank waits for this result
      } else {
        if (a.fused != 0 || forward_only) return false;
        if (a.kind >= kind::backward_weight) {
          if (a.kind == kind::backward_weight) {
            if (state[cell] != input_done) return false;
            state[cell] = gradient_done;
            continue;
          }
          if (is_own(a.kind)) {  // no rank waits for own actions; `check_lists` (check.hpp) checks their order
            if (!plan.own[own_number(a.kind)].declared) return false;
            ++missing;
            continue;
          }
          if (a.kind != kind::recompute || (state[cell] & ~gradient_awaited) != forward_done) return false;
          state[cell] = static_cast<std::uint8_t>(state[cell] + (recomputed - forward_done));
          ++missing;
          continue;
        }
        if (stage < last_stage && state[cell + 1] < input_done) {
          state[cell + 1] = static_cast<std::uint8_t>(state[cell + 1] | gradient_awaited);
          break;
        }
        int now = state[cell];
        if (a.kind == kind::backward) {
          state[cell] = gradient_done;
        } else {
          if (a.kind != kind::backward_input) return false;
          state[cell] = input_done;
          ++missing;
        }
        stays = InTurns;
        if (now == forward_done || now == recomputed) continue;
        if (now != forward_done + gradient_awaited && now != recomputed + gradient_awaited) return false;
        --stage;  // the stage whose rank waits for this result
      }
      // The rank that waited gets the next turn.
      int woken = plan.rank_of[stage];
      after[woken] = after[rank];
      after[rank] = woken;
      if (previous == rank) previous = woken;
    }
    next[rank] = i;
    if (stays) {
      previous = rank;
    } else if (after[rank] != rank) {
      after[previous] = after[rank];
    } else {
      break;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    if (next[r] < plan.begin[r + 1]) return false;
  }
  return missing == 0;
}

/// Whether each stage runs the slices of a microbatch in order in F, and in reverse order in B or I, for a plan for which
/// `plays_through` is true. All slices of a stage are on one rank, so reading the lists suffices.
constexpr bool slices_in_order(plan_view const& plan) {
  int slices = plan.size.slices;
  if (slices == 1) return true;
  int micro_batches = plan.size.micro_batches;
  int cells = plan.stages * micro_batches;
  buffer<int> run(2 * cells, zeroed);  // by kind, stage and microbatch: number of slices that have run
  for (int i = 0; i < plan.total(); ++i) {
    action a = plan.actions[i];
    int unit = static_cast<int>(a.micro_batch);
    if (row_of(a.kind).carry == 0) continue;
    bool forward = makes_output(a.kind);
    int& next = run.data[(forward ? 0 : cells) + static_cast<int>(a.stage) * micro_batches + unit / slices];
    if (next++ != (forward ? unit : mirrored(unit, slices)) % slices) return false;
  }
  return true;
}

}  // namespace chevron::detail
