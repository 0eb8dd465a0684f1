#pragma once

#include <cstdint>
#include <type_traits>

#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/limits.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/wait_cycle.hpp>
#include <chevron/prove/walk.hpp>

/// \file
/// Checks the laws of a plan. `check` returns the first broken law as a value, `checked<>` reports it as a compile error and
/// `prove` as an exception; error and exception contain the sentence of `describe`.

namespace chevron {

namespace detail {

// Bits of the state of a (stage, microbatch) while a rank's list is read: the kinds that have occurred.
inline constexpr std::uint8_t seen_forward = kind_bit(kind::forward);
inline constexpr std::uint8_t seen_backward = kind_bit(kind::backward);
inline constexpr std::uint8_t seen_input = kind_bit(kind::backward_input);
inline constexpr std::uint8_t seen_weight = kind_bit(kind::backward_weight);

constexpr int position_of(plan_view const& plan, int rank, action wanted) {
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) {
    if (plan.actions[i] == wanted) return i - plan.begin[rank];
  }
  return -1;
}

constexpr finding check_placement(plan_view const& plan) {
  int const ranks = plan.size.ranks;
  buffer<int> held(ranks, zeroed);
  for (int s = 0; s < plan.stages; ++s) {
    int const rank = plan.rank_of[s];
    if (rank < 0 || rank >= ranks) return fault(law::placement, "a stage lives on a rank that does not exist, stage ", s, ranks);
    ++held.data[rank];
  }
  for (int r = 0; r < ranks; ++r) {
    if (held.data[r] == 0) return fault(law::placement, "a rank has no stage, rank ", r);
  }
  return {};
}

/// Completes the finding about an action whose stage or microbatch does not exist, or which is on the wrong rank.
constexpr finding misplaced(plan_view const& plan, finding f) {
  f.broken = law::ids_in_range;
  if (static_cast<int>(f.what.stage) >= plan.stages)
    f.words = " names a stage that does not exist; stages: ", f.limit = plan.stages;
  else if (static_cast<int>(f.what.micro_batch) >= plan.size.units())
    f.words = " names a microbatch that does not exist; microbatches: ", f.limit = plan.size.units();
  else
    f.words = " is on the wrong rank: its stage lives on rank ", f.other_rank = plan.rank_of[f.what.stage];
  return f;
}

/// Helps to explain an I or B that comes before its F. If another chunk of the rank has run F for this microbatch, the order
/// may have selected the wrong chunk. \returns in this case the number of the rank's chunks, otherwise 0
constexpr int drawn_from(plan_view const& plan, int stage, int micro_batch, kind what, std::uint8_t const* seen) {
  if (what == kind::backward_weight) return 0;
  int chunks = 0;
  bool ready = false;
  for (int s = 0; s < plan.stages; ++s) {
    if (plan.rank_of[s] != plan.rank_of[stage]) continue;
    ++chunks;
    ready = ready || (seen[s * plan.size.units() + micro_batch] & seen_forward) != 0;
  }
  return ready ? chunks : 0;
}

/// Returns the first kind that has run in a cell although the plan's order of an own kind (`plan_facts::own`) requires `what`
/// to run earlier; -1 if no kind has.
/// \param seen bits of the kinds that the cell has run
constexpr int passed_over(plan_view const& plan, std::uint8_t seen, kind what) {
  for (int k = 0; k < own_kinds && plan.has_own_kinds(); ++k) {
    int const own = static_cast<int>(kind::own_x) + k;
    if ((seen & (1 << own)) != 0 && (plan.own[k].after & kind_bit(what)) != 0) return own;
    int const behind = own == static_cast<int>(what) ? seen & plan.own[k].before : 0;
    for (int other = 0; other < compute_kinds; ++other) {
      if ((behind & (1 << other)) != 0) return other;
    }
  }
  return -1;
}

/// Checks that every (stage, microbatch) has F, and B or I and W, and the own kinds that the plan declares for every (stage,
/// microbatch).
constexpr finding check_complete(plan_view const& plan, std::uint8_t const* seen) {
  int const micro_batches = plan.size.units();
  for (int stage = 0; stage < plan.stages; ++stage) {
    for (int m = 0; m < micro_batches; ++m) {
      auto const missing = [&](kind what, char const* words) {
        return finding{.broken = law::complete, .rank = plan.rank_of[stage], .what = make_action(what, stage, m), .words = words};
      };
      int const all = seen[stage * micro_batches + m];
      for (int k = 0; k < own_kinds; ++k) {
        kind const own = static_cast<kind>(static_cast<int>(kind::own_x) + k);
        if (!plan.own[k].declared || !plan.own[k].every || plan.forward_only || (all & kind_bit(own)) != 0) continue;
        return missing(own, "its declaration requires one for each stage and microbatch");
      }
      int const cell = all & (seen_forward | seen_backward | seen_input | seen_weight);
      if (cell == (seen_forward | seen_backward) || cell == (seen_forward | seen_input | seen_weight)) continue;
      if (plan.forward_only && cell == seen_forward) continue;
      if ((cell & seen_forward) == 0) return missing(kind::forward, "every stage runs every microbatch forward");
      if ((cell & (seen_input | seen_weight)) == 0)
        return missing(kind::backward, "every F is followed by its B, or by its I and its W");
      if ((cell & seen_weight) == 0) return missing(kind::backward_weight, "every I is followed by its W");
      return missing(kind::backward_input, "a W needs its I");
    }
  }
  return {};
}

/// Checks, for each rank, all laws that concern a single rank's list.
constexpr finding check_lists(plan_view const& plan, std::uint8_t* seen) {
  int const micro_batches = plan.size.units();
  step_graph const graph(plan);
  action const* const actions = plan.actions;
  finding late;  // a broken order; reported only if no action is missing, since a missing F is the better explanation
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const first = plan.begin[r];
    int const stop = plan.begin[r + 1];
    for (int i = first; i < stop; ++i) {
      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const micro_batch = static_cast<int>(a.micro_batch);
      finding f{.rank = r, .position = i - first, .what = a};
      auto const broken = [&f](law which, char const* words) {
        f.broken = which;
        f.words = words;
        return f;
      };
      // Returns the finding that an action of this cell which has run, the one of kind `what`, comes too early.
      auto const too_early = [&](kind what) {
        action const before = make_action(what, stage, micro_batch);
        return finding{.broken = law::order, .rank = r, .position = position_of(plan, r, before), .what = before, .other = a};
      };
      if (!is_compute(a.kind)) {
        f.limit = plan.stages;
        return broken(law::ids_in_range, " is no computation: a plan holds only F, B, I, W, R and own actions; stages: ");
      }
      if (stage >= plan.stages || micro_batch >= micro_batches || plan.rank_of[stage] != r) return misplaced(plan, f);
      if (is_own(a.kind) && !plan.own[own_number(a.kind)].declared) {
        f.limit = own_number(a.kind);
        return broken(
            law::ids_in_range,
            " is of a kind that the plan does not declare. Remedy: own_action in the description, or plan::own[k].declared, "
            "here with k = ");
      }
      std::uint8_t& cell = seen[stage * micro_batches + micro_batch];
      std::uint8_t const bit = kind_bit(a.kind);
      if ((cell & bit) != 0) {
        f.other_position = position_of(plan, r, a);
        return broken(law::no_duplicate, " was already done at step ");
      }
      if (plan.forward_only && a.kind != kind::forward) return broken(law::no_duplicate, " has no place in a forward-only plan");
      if (a.fused != 0) {
        bool const ends = i + 1 == stop;
        f.other = ends ? a : actions[i + 1];
        f.links = ends ? 0 : 1;
        bool const pair = makes_output(a.kind) && makes_input_gradient(f.other.kind);
        if (!pair || (f.other.stage == a.stage && f.other.micro_batch == a.micro_batch))
          return broken(law::fused_pair,
                        ends   ? " is marked as half of a fused pair, but is the last action of its rank"
                        : pair ? " is fused with its own backward, which needs it: "
                               : " is marked as half of a fused pair, which is an F and then a B or I, but after it comes ");
        f.links = 0;
      }
      if ((cell & row_of(a.kind).excludes) != 0) {
        if (a.kind == kind::recompute) return too_early((cell & seen_backward) != 0 ? kind::backward : kind::backward_input);
        return broken(law::no_duplicate, a.kind == kind::backward
                                             ? " would add these gradients twice: this microbatch already has an I or a W"
                                             : " would add these gradients twice: this microbatch already has a B");
      }
      if (int const earlier = passed_over(plan, cell, a.kind); earlier >= 0 && !late)
        late = too_early(static_cast<kind>(earlier));
      std::uint8_t const needs = row_of(a.kind).after;
      if ((cell & needs) != needs && !late) {
        f.other = make_action(a.kind == kind::backward_weight ? kind::backward_input : kind::forward, stage, micro_batch);
        f.number = drawn_from(plan, stage, micro_batch, a.kind, seen);
        late = broken(law::order, "");
      }
      int const carried = graph.carries_from(a);
      std::uint8_t const carriers = makes_output(a.kind) ? seen_forward : seen_backward | seen_input;
      if (carried >= 0 && (seen[stage * micro_batches + carried] & carriers) == 0 && !late) {
        f.other = make_action(a.kind, stage, carried);
        late = broken(law::order, "");
      }
      cell = static_cast<std::uint8_t>(cell | bit);
    }
  }
  if (finding const f = check_complete(plan, seen)) return f;
  return late;
}

/// The action of another stage whose result an action, or a fused pair, still waits for.
struct need {
  bool open = false;
  action what{};
};
/// Returns what an action still waits for.
/// \param made by result: 1 if an action has computed the result, otherwise 0
/// \param seen by cell: bits of the kinds that the rank's list contains for the cell
constexpr need need_of(step_graph const& graph, action a, std::uint8_t const* made, std::uint8_t const* seen) {
  int const result = graph.needs(a);
  if (result < 0 || made[result] != 0) return {};
  int const stage = graph.from(a);
  int const micro_batch = static_cast<int>(a.micro_batch);
  kind const backward = (seen[graph.cell_of(stage, micro_batch)] & seen_input) != 0 ? kind::backward_input : kind::backward;
  return {true, make_action(makes_output(a.kind) ? kind::forward : backward, stage, micro_batch)};
}

/// Finds ranks that wait for each other, in a plan whose lists pass `check_lists`. Each stuck rank needs the result of an
/// action that another rank has queued after its own next action, so following these waits leads into a cycle. The finding
/// names the lowest rank of the cycle. \returns no finding if every rank reaches the end of its list
constexpr finding find_deadlock(plan_view const& plan, std::uint8_t const* seen) {
  int const ranks = plan.size.ranks;
  step_graph const graph(plan);
  buffer<std::uint8_t> made(graph.results(), zeroed);
  buffer<int> next_memory(ranks);
  int* const next = next_memory.data;
  auto const need_at = [&](int position) {
    action const a = plan.actions[position];
    need const own = need_of(graph, a, made.data, seen);
    return own.open || a.fused == 0 ? own : need_of(graph, plan.actions[position + 1], made.data, seen);
  };
  for (int r = 0; r < ranks; ++r) next[r] = plan.begin[r];
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      while (next[r] < plan.begin[r + 1] && !need_at(next[r]).open) {
        int const halves = plan.actions[next[r]].fused != 0 ? 2 : 1;
        for (int half = 0; half < halves; ++half) {
          if (int const result = graph.makes(plan.actions[next[r]++]); result >= 0) made.data[result] = 1;
        }
        moved = true;
      }
    }
  }
  return deadlock_of(
      plan, plan.begin, next, [&](int rank) { return plan.actions[next[rank]]; },
      [&](int rank) { return need_at(next[rank]).what; });
}

/// Finds the first broken law of a plan, more slowly than `plays_through` but with all facts of the law's sentence.
constexpr finding diagnose(plan_view const& plan) {
  buffer<std::uint8_t> seen(plan.stages * plan.size.units(), zeroed);
  finding f = check_lists(plan, seen.data);
  if (!f) f = find_deadlock(plan, seen.data);
  f.slices = plan.size.slices;
  return f;
}

/// Checks all limits: those that the plan declares, and the limit of a program's activation slots.
constexpr finding check_limits(plan_view const& plan) {
  finding f = check_in_flight(plan);
  if (!f) f = check_bytes(plan);
  if (!f) f = check_message_count(plan);
  f.slices = plan.size.slices;
  return f;
}

/// The steps of a proof: the plan's own problem, its placement, one sweep for all laws about actions and their order, the search
/// for a fault if the sweep finds one or does not check all of these laws, and the limits.
/// \param plays returns the result of `plays_through` for the plan, in memory that the caller chooses
/// \returns the first broken law
template <class Plays>
constexpr finding proof_of(plan_view const& plan, Plays plays) {
  if (plan.problem) return plan.problem;
  if (finding const f = check_placement(plan)) return f;
  if (!plays() || plan.has_own_kinds() || !slices_in_order(plan)) {
    if (finding const f = diagnose(plan)) return f;
  }
  return check_limits(plan);
}

}  // namespace detail

/// Returns the first broken law, or a finding of `law::none`, which converts to false: `if (finding const f = check(plan))`.
/// `describe(f)` is the finding's sentence. Time and memory are linear in the number of actions.
/// \param plan any plan, lawful or not; if the plan has a `problem`, `check` returns the problem
/// \returns law, rank, position in that rank's list (from 0) and the other facts of the sentence; never throws
constexpr finding check(plan_view const& plan) {
  return detail::proof_of(plan, [&plan] {
    buffer<std::uint8_t> state(plan.stages * plan.size.units(), zeroed);
    buffer<int> next(plan.size.ranks), after(plan.size.ranks);
    return std::is_constant_evaluated() ? detail::plays_through<true>(plan, state.data, next.data, after.data)
                                        : detail::plays_through<false>(plan, state.data, next.data, after.data);
  });
}

}  // namespace chevron
