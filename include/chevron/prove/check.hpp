#pragma once

#include <cstdint>

#include <range/v3/algorithm/find.hpp>
#include <range/v3/algorithm/find_if.hpp>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// The laws on a plan. `check` returns the first one that is broken, as a value: `checked<>` makes it a compile error, a
/// running program an exception, both with `describe`'s sentence.

namespace chevron {

namespace detail {

// What is known of one (stage, microbatch) while a rank's list is read.
inline constexpr std::uint8_t seen_forward = 1;
inline constexpr std::uint8_t seen_backward = 2;
inline constexpr std::uint8_t seen_input = 4;
inline constexpr std::uint8_t seen_weight = 8;
// What has been made when the plan is played.
inline constexpr std::uint8_t made_forward = 16;
inline constexpr std::uint8_t made_gradient = 32;

constexpr std::uint8_t seen_bit(kind what) { return static_cast<std::uint8_t>(1 << static_cast<int>(what)); }

constexpr int position_of(plan_view const& plan, int rank, action wanted) {
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) {
    if (plan.actions[i] == wanted) return i - plan.begin[rank];
  }
  return -1;
}

constexpr finding check_placement(plan_view const& plan) {
  std::int16_t const* const first = plan.rank_of;
  std::int16_t const* const last = first + plan.stages;
  finding f;
  f.broken = law::placement;
  f.limit = plan.size.ranks;
  auto const lost = ranges::find_if(first, last, [&](int rank) { return rank < 0 || rank >= plan.size.ranks; });
  if (lost != last) {
    f.words = "a stage lives on a rank that does not exist, stage ";
    f.number = static_cast<int>(lost - first);
    return f;
  }
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (ranges::find(first, last, r) != last) continue;
    f.words = "a rank has no stage, rank ";
    f.number = r;
    f.limit = 0;
    return f;
  }
  return {};
}

/// Completes the finding of an action whose stage or microbatch does not exist, or which stands on the wrong rank.
constexpr finding misplaced(plan_view const& plan, finding f) {
  f.broken = law::ids_in_range;
  if (static_cast<int>(f.what.stage) >= plan.stages)
    f.words = " names a stage that does not exist; stages: ", f.limit = plan.stages;
  else if (static_cast<int>(f.what.micro_batch) >= plan.size.micro_batches)
    f.words = " names a microbatch that does not exist; microbatches: ", f.limit = plan.size.micro_batches;
  else
    f.words = " is on the wrong rank: its stage lives on rank ", f.other_rank = plan.rank_of[f.what.stage];
  return f;
}

/// Everything that one rank's list can break by itself.
constexpr finding check_lists(plan_view const& plan, std::uint8_t* seen) {
  int const micro_batches = plan.size.micro_batches;
  action const* const actions = plan.actions;
  finding late;  // an order broken; reported only if nothing is missing, since a missing F explains it better
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const first = plan.begin[r];
    int const stop = plan.begin[r + 1];
    for (int i = first; i < stop; ++i) {
      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const micro_batch = static_cast<int>(a.micro_batch);
      finding f;
      f.rank = r;
      f.position = i - first;
      f.what = a;
      if (stage >= plan.stages || micro_batch >= micro_batches || plan.rank_of[stage] != r || !is_compute(a.what)) {
        f.broken = law::ids_in_range;
        if (is_compute(a.what)) return misplaced(plan, f);
        f.words = " is no computation: a plan holds only F, B, I and W; stages: ", f.limit = plan.stages;
        return f;
      }
      std::uint8_t& cell = seen[stage * micro_batches + micro_batch];
      std::uint8_t const bit = seen_bit(a.what);
      if ((cell & bit) != 0) {
        f.broken = law::no_duplicate;
        f.words = " was already done at step ";
        f.other_position = position_of(plan, r, a);
        return f;
      }
      if (plan.forward_only && a.what != kind::forward) {
        f.broken = law::no_duplicate;
        f.words = " has no place in a forward-only plan";
        return f;
      }
      bool const mixes = (a.what == kind::backward && (cell & (seen_input | seen_weight)) != 0) ||
                         ((a.what == kind::backward_input || a.what == kind::backward_weight) && (cell & seen_backward) != 0);
      if (mixes) {
        f.broken = law::no_duplicate;
        f.words = a.what == kind::backward ? " would add these gradients twice: this microbatch already has an I or a W"
                                           : " would add these gradients twice: this microbatch already has a B";
        return f;
      }
      std::uint8_t const needs = a.what == kind::forward ? 0 : a.what == kind::backward_weight ? seen_input : seen_forward;
      if ((cell & needs) != needs && !late) {
        f.broken = law::order;
        f.other = make_action(a.what == kind::backward_weight ? kind::backward_input : kind::forward, stage, micro_batch);
        late = f;
      }
      cell = static_cast<std::uint8_t>(cell | bit);
    }
  }
  // Every cell of the grid must hold F, and B or I and W.
  for (int stage = 0; stage < plan.stages; ++stage) {
    for (int m = 0; m < micro_batches; ++m) {
      std::uint8_t const cell = seen[stage * micro_batches + m];
      if (cell == (seen_forward | seen_backward) || cell == (seen_forward | seen_input | seen_weight)) continue;
      if (plan.forward_only && cell == seen_forward) continue;
      finding f;
      f.broken = law::complete;
      f.rank = plan.rank_of[stage];
      if ((cell & seen_forward) == 0) {
        f.what = make_action(kind::forward, stage, m);
        f.words = "every stage runs every microbatch forward";
      } else if ((cell & (seen_input | seen_weight)) == 0) {
        f.what = make_action(kind::backward, stage, m);
        f.words = "every F is followed by its B, or by its I and its W";
      } else if ((cell & seen_weight) == 0) {
        f.what = make_action(kind::backward_weight, stage, m);
        f.words = "every I is followed by its W";
      } else {
        f.what = make_action(kind::backward_input, stage, m);
        f.words = "a W needs its I";
      }
      return f;
    }
  }
  return late;
}

/// What an action waits for on another stage; `stage` -1: nothing.
constexpr action needed_from_neighbour(plan_view const& plan, action a, std::uint8_t const* seen, bool& needs_one) {
  int const stage = static_cast<int>(a.stage);
  int const micro_batch = static_cast<int>(a.micro_batch);
  needs_one = true;
  if (a.what == kind::forward && stage > 0) return make_action(kind::forward, stage - 1, micro_batch);
  if ((a.what == kind::backward || a.what == kind::backward_input) && stage + 1 < plan.stages) {
    bool const split = (seen[(stage + 1) * plan.size.micro_batches + micro_batch] & seen_input) != 0;
    return make_action(split ? kind::backward_input : kind::backward, stage + 1, micro_batch);
  }
  needs_one = false;
  return a;
}

/// Plays the plan as far as it goes: each rank runs until its next action needs something not yet made. Sends may be
/// rendezvous: on a lowered program receives are posted ahead of their use in the order of the sends, so what blocks a rank
/// is always the computation it waits for.
constexpr finding check_progress(plan_view const& plan, std::uint8_t* seen) {
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.micro_batches;
  int const last_stage = plan.stages - 1;
  int const cells = plan.stages * micro_batches;
  buffer<int> next_memory(ranks);
  buffer<int> waits_for_memory(ranks);
  buffer<int> ready_memory(ranks);
  std::uint8_t* const made = seen;  // two more bits of the same cells
  int* const next = next_memory.data;
  int* const waits_for = waits_for_memory.data;
  int* const ready = ready_memory.data;
  action const* const actions = plan.actions;
  std::int16_t const* const rank_of = plan.rank_of;
  int ready_count = 0;
  for (int r = ranks - 1; r >= 0; --r) {
    next[r] = plan.begin[r];
    waits_for[r] = -1;
    ready[ready_count++] = r;
  }
  while (ready_count > 0) {
    int const rank = ready[--ready_count];
    int const stop = plan.begin[rank + 1];
    int i = next[rank];
    for (; i < stop; ++i) {
      action const a = actions[i];
      if (a.what == kind::backward_weight) continue;
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      if (a.what == kind::forward) {
        if (stage > 0 && (made[cell - micro_batches] & made_forward) == 0) {
          waits_for[rank] = cell - micro_batches;
          break;
        }
        made[cell] = static_cast<std::uint8_t>(made[cell] | made_forward);
        if (stage < last_stage) {
          int const consumer = rank_of[stage + 1];
          if (waits_for[consumer] == cell) {
            waits_for[consumer] = -1;
            ready[ready_count++] = consumer;
          }
        }
      } else {
        if (stage < last_stage && (made[cell + micro_batches] & made_gradient) == 0) {
          waits_for[rank] = cells + cell + micro_batches;
          break;
        }
        made[cell] = static_cast<std::uint8_t>(made[cell] | made_gradient);
        if (stage > 0) {
          int const consumer = rank_of[stage - 1];
          if (waits_for[consumer] == cells + cell) {
            waits_for[consumer] = -1;
            ready[ready_count++] = consumer;
          }
        }
      }
    }
    next[rank] = i;
  }

  int stuck = -1;
  for (int r = 0; r < ranks && stuck < 0; ++r) {
    if (next[r] < plan.begin[r + 1]) stuck = r;
  }
  if (stuck < 0) return {};

  // Each stuck rank waits for a computation queued on some rank behind that rank's own next action. Following that chain
  // ends in a cycle; the rank with the lowest number on it speaks for all.
  bool needs_one = false;
  int walker = stuck;
  for (int hop = 0; hop < ranks; ++hop) {
    walker = rank_of[static_cast<int>(needed_from_neighbour(plan, actions[next[walker]], seen, needs_one).stage)];
  }
  int lowest = walker;
  int links = 0;
  int at = walker;
  do {
    at = rank_of[static_cast<int>(needed_from_neighbour(plan, actions[next[at]], seen, needs_one).stage)];
    lowest = at < lowest ? at : lowest;
    ++links;
  } while (at != walker);
  finding f;
  f.broken = law::deadlock;
  f.rank = lowest;
  f.position = next[lowest] - plan.begin[lowest];
  f.what = actions[next[lowest]];
  f.links = links;
  f.other = needed_from_neighbour(plan, f.what, seen, needs_one);
  f.other_rank = rank_of[static_cast<int>(f.other.stage)];
  f.behind = actions[next[f.other_rank]];
  f.then = needed_from_neighbour(plan, f.behind, seen, needs_one);
  int previous = lowest;
  for (int hop = 0; hop + 1 < links; ++hop) {
    previous = rank_of[static_cast<int>(needed_from_neighbour(plan, actions[next[previous]], seen, needs_one).stage)];
  }
  f.last_behind = needed_from_neighbour(plan, actions[next[previous]], seen, needs_one);
  return f;
}

/// A program numbers its slots in 16 bits and needs at most three for each chunk in flight.
inline constexpr int most_in_flight = 0xffff / 3;

constexpr finding check_in_flight(plan_view const& plan) {
  bool const declared = plan.in_flight_limit > 0 && plan.in_flight_limit < most_in_flight;
  int const limit = declared ? plan.in_flight_limit : most_in_flight;
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (plan.length(r) / 2 <= limit) continue;  // no more forwards than that, since each has its backward
    int now = 0;
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      now += in_flight_change(plan.actions[i].what, plan.forward_only);
      if (now <= limit) continue;
      finding f;
      f.broken = law::in_flight;
      f.rank = r;
      f.position = i - plan.begin[r];
      f.what = plan.actions[i];
      f.number = now;
      f.limit = limit;
      f.words = declared ? "the declared limit is " : "the most that a program has slots for is ";
      return f;
    }
  }
  return {};
}

}  // namespace detail

/// The first broken law, or `law::none`. O(actions).
constexpr finding check(plan_view const& plan) {
  if (plan.problem) return plan.problem;
  if (finding const f = detail::check_placement(plan)) return f;
  buffer<std::uint8_t> seen(plan.stages * plan.size.micro_batches, zeroed);
  if (finding const f = detail::check_lists(plan, seen.data)) return f;
  if (finding const f = detail::check_progress(plan, seen.data)) return f;
  return detail::check_in_flight(plan);
}

}  // namespace chevron
