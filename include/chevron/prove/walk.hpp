#pragma once

#include <cstdint>

#include <chevron/plan/plan.hpp>

/// \file
/// Plays a plan once, holding every action against every law about actions. A lawful plan passes here, in one sweep; `check`
/// looks for words only where this says no.

namespace chevron::detail {

// What is known of one (stage, microbatch) while the plan is played: how far it has come …
inline constexpr int untouched = 0;
inline constexpr int forward_done = 1;
inline constexpr int input_done = 2;     // by I; its W is to come
inline constexpr int gradient_done = 3;  // by B, or by I and W: nothing is to come
inline constexpr int progress_bits = 3;
// … and whether a rank stands waiting for its forward or its gradient.
inline constexpr int forward_awaited = 4;
inline constexpr int gradient_awaited = 8;

/// Whether every rank runs to the end of its list, each action where it belongs, after what it needs, exactly once. Sends may
/// be rendezvous: on a lowered program receives are posted ahead of their use in the order of the sends, so what blocks a rank
/// is always the computation it waits for.
///
/// The caller brings the memory, as arrays or as pointers: `state`, stages × microbatches zeros; `next` and `ready`, one
/// element a rank. Constant evaluation reads and writes arrays at half the cost of pointers.
template <class Plan, class States, class Positions>
constexpr bool plays_through(Plan const& plan, States& state, Positions& next, Positions& ready) {
  int const ranks = plan.size.ranks;
  int const stages = plan.stages;
  int const last_stage = stages - 1;
  int const micro_batches = plan.size.micro_batches;
  int unfinished = stages * micro_batches;
  int ready_count = 0;
  for (int r = ranks - 1; r >= 0; --r) {
    next[r] = plan.begin[r];
    ready[ready_count++] = r;
  }
  bool const forward_only = plan.forward_only;
  while (ready_count > 0) {
    int const rank = ready[--ready_count];
    int const stop = plan.begin[rank + 1];
    int checked_stage = -1;  // known to live here
    bool paired = false;     // the action is a fused pair's second half, whose needs were seen to
    int i = next[rank];
    for (; i < stop; ++i) {
      action const a = plan.actions[i];
      int const stage = static_cast<int>(a.stage);
      int const micro_batch = static_cast<int>(a.micro_batch);
      if (stage != checked_stage) {
        if (stage > last_stage || plan.rank_of[stage] != rank) return false;
        checked_stage = stage;
      }
      if (micro_batch >= micro_batches) return false;
      int const cell = stage * micro_batches + micro_batch;
      int const now = state[cell];

      if (a.what == kind::forward) {
        if ((now & progress_bits) != untouched) return false;
        if (a.fused != 0) {
          // Both halves must be able to start.
          if (i + 1 == stop || forward_only) return false;
          action const other = plan.actions[i + 1];
          int const other_stage = static_cast<int>(other.stage);
          if (other.what != kind::backward && other.what != kind::backward_input) return false;
          if (other_stage > last_stage || plan.rank_of[other_stage] != rank) return false;
          if (static_cast<int>(other.micro_batch) >= micro_batches) return false;
          int const other_cell = other_stage * micro_batches + static_cast<int>(other.micro_batch);
          if (other_cell == cell) return false;
          if (other_stage < last_stage && (state[other_cell + micro_batches] & progress_bits) < input_done) {
            state[other_cell + micro_batches] = static_cast<std::uint8_t>(state[other_cell + micro_batches] | gradient_awaited);
            break;
          }
        }
        if (stage > 0 && (state[cell - micro_batches] & progress_bits) == untouched) {
          state[cell - micro_batches] = static_cast<std::uint8_t>(state[cell - micro_batches] | forward_awaited);
          break;
        }
        paired = a.fused != 0;
        if (now != untouched) {
          if ((now & forward_awaited) != 0) ready[ready_count++] = plan.rank_of[stage + 1];
          state[cell] = static_cast<std::uint8_t>((now & gradient_awaited) | forward_done);
        } else {
          state[cell] = forward_done;
        }
        if (forward_only) --unfinished;
      } else if (a.what == kind::backward_weight) {
        if (now != input_done || a.fused != 0) return false;
        state[cell] = gradient_done;
        --unfinished;
      } else {
        if (a.what != kind::backward && a.what != kind::backward_input) return false;
        if ((now & progress_bits) != forward_done || forward_only || a.fused != 0) return false;
        if (stage < last_stage && !paired && (state[cell + micro_batches] & progress_bits) < input_done) {
          state[cell + micro_batches] = static_cast<std::uint8_t>(state[cell + micro_batches] | gradient_awaited);
          break;
        }
        paired = false;
        if (now != forward_done) ready[ready_count++] = plan.rank_of[stage - 1];
        if (a.what == kind::backward) {
          state[cell] = gradient_done;
          --unfinished;
        } else {
          state[cell] = input_done;
        }
      }
    }
    next[rank] = i;
  }
  return unfinished == 0;
}

}  // namespace chevron::detail
