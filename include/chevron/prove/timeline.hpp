#pragma once

#include <cstdint>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/wires.hpp>

/// \file
/// Plays a plan: each action starts as soon as its rank is free and its inputs have arrived. Makespan, span and bubble follow.

namespace chevron {

/// Start and end of each action, in the costs' unit, indexed as `plan_view::actions`. The earliest start is 0.
struct timeline {
  buffer<double> start;
  buffer<double> end;
  /// False when the plan deadlocks: actions that never ran then have start and end 0.
  bool complete = false;
};

/// The index of the B or I of the fused pair that begins at `i`, or `i` if none does; the rank's list ends before `stop`.
constexpr int last_of_pair(action const* actions, int i, int stop) { return actions[i].fused != 0 && i + 1 < stop ? i + 1 : i; }

namespace detail {

/// The time at which each stage's parameters have been gathered; empty if `costs` have no gathers.
/// \param clock by rank, when the rank's gathers begin; null: at 0
template <class Costs>
constexpr buffer<double> whole_from(plan_view const& plan, Costs const& costs, double const* clock = nullptr) {
  if (costs.unshard == nullptr) return {};
  buffer<double> out(plan.stages), gathered(plan.size.ranks);
  for (int r = 0; r < plan.size.ranks; ++r) gathered.data[r] = clock != nullptr ? clock[r] : 0;
  for (int s = 0; s < plan.stages; ++s) out.data[s] = gathered.data[plan.rank_of[s]] += costs.unshard[s * costs.unshard_stride];
  return out;
}

/// Costs with gathers of parameters before single actions; their `gather_queues` starts them (`lower/gather_times.hpp`).
template <class Costs>
concept gathers_in_order = requires { typename Costs::gather_queues; };

/// Costs in which each slice has transfers of its own (`prove/slice_times.hpp`).
template <class Costs>
concept has_own_slices = requires(Costs const& costs) { costs.of_slice(0); };

/// The gathers of costs without `gather_queues`: none.
struct no_gathers {
  constexpr void start(int, int, double, double*) const {}
};

/// The state of a play: results by cell, and lists by rank.
struct play_state {
  /// The time from which a stage's output (cells from 0) and its input gradient (behind all outputs) can be used by their
  /// consumer: the arrival of their message, if any; the earliest start of the transfer, if it occupies the receiver. Negative:
  /// not yet.
  buffer<double> made;
  buffer<int> next;       ///< by rank: its next action
  buffer<int> waits_for;  ///< by rank: the result for which it waits; -1: none
  buffer<int> ready;      ///< a stack of the ranks that can go on, at first all

  constexpr explicit play_state(plan_view const& plan)
      : made(2 * plan.stages * plan.size.units()), next(plan.size.ranks), waits_for(plan.size.ranks), ready(plan.size.ranks) {
    int const ranks = plan.size.ranks;
    int const results = 2 * plan.stages * plan.size.units();
    for (int i = 0; i < results; ++i) made.data[i] = -1;
    for (int r = 0; r < ranks; ++r) {
      next.data[r] = plan.begin[r];
      waits_for.data[r] = -1;
      ready.data[ranks - 1 - r] = r;
    }
  }

  /// Sets the times of actions that never ran to 0.
  constexpr void clear_rest(plan_view const& plan, double* start, double* end) const {
    for (int r = 0; r < plan.size.ranks; ++r) {
      for (int i = next.data[r]; i < plan.begin[r + 1]; ++i) start[i] = end[i] = 0;
    }
  }
};

/// Plays a plan once, O(actions): each rank executes its list in order, and waits only for inputs of its next action.
/// \param costs a `cost_view`, or a type with costs of each single action
/// \param clock by rank, and behind the ranks by wire: the time from which it is free; updated
/// \returns the number of actions that ran
template <class Costs>
constexpr int play(plan_view const& plan, Costs const& costs, wires const& links, double* clock, double* start, double* end) {
  int const micro_batches = plan.size.units();
  int const cells = plan.stages * micro_batches;
  int const last_stage = plan.stages - 1;
  bool const sender = costs.occupies_sender();
  bool const receiver = costs.occupies_receiver();
  bool const wired = links.count > 0;
  // As `of_message`, without a call: searches play plans while compiling, and calls take most of that time.
  double const* const transfer = costs.communication;
  int const transfers = costs.communication_stride;
  bool const alike = costs.lengths.alike();
  buffer<double> const whole = [&] {  // null: always
    if constexpr (gathers_in_order<Costs>)
      return buffer<double>(plan.stages, zeroed);
    else
      return whole_from(plan, costs, clock);
  }();
  auto gathers = [&] {
    if constexpr (gathers_in_order<Costs>)
      return typename Costs::gather_queues(costs, plan);
    else
      return no_gathers{};
  }();
  play_state state(plan);
  double* const made = state.made.data;
  int* const next = state.next.data;
  int* const waits_for = state.waits_for.data;
  int* const ready = state.ready.data;
  int ready_count = plan.size.ranks;
  action const* const actions = plan.actions;
  std::int16_t const* const rank_of = plan.rank_of;
  int done = 0;
  while (ready_count > 0) {
    int const rank = ready[--ready_count];
    int const stop = plan.begin[rank + 1];
    int i = next[rank];
    double now = clock[rank];
    double earliest = now;  // the earliest start of the action
    double finish = now;
    bool joins = false;  // a pair's second half joins the wait of its first half
    int halves = 0;      // of a pair whose time is known: halves still to be written
    for (; i < stop; ++i) {
      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      if (halves == 0) {
        if (!joins) gathers.start(rank, i - plan.begin[rank], now, whole.data);
        if (whole.data != nullptr && whole.data[stage] > earliest) earliest = whole.data[stage];
        int needed = -1;
        if (a.kind == kind::forward) {
          if (stage > 0) needed = cell - micro_batches;
        } else if (a.kind == kind::backward_weight) {
          if (made[cells + cell] < 0) needed = cells + cell;
        } else if (a.kind > kind::backward_weight) {  // R needs its F, own actions nothing
          if (a.kind == kind::recompute && made[cell] < 0) needed = cell;
        } else if (made[cell] < 0) {
          needed = cell;
        } else if (stage < last_stage) {
          needed = cells + cell + micro_batches;
        }
        if (needed >= 0) {
          double const there = made[needed];
          if (there < 0) {
            waits_for[rank] = needed;
            i -= joins ? 1 : 0;
            break;
          }
          if (there > earliest) earliest = there;
          if (receiver) {
            int const boundary = step_graph(plan).comes_over(a);
            if (boundary >= 0) earliest += costs.of_message(boundary, static_cast<int>(a.micro_batch));
          }
        }
        if (a.fused != 0 && !joins && i + 1 < stop) {
          joins = true;
          continue;
        }
        if (joins) {
          now = finish = earliest + costs.of_pair(actions[i - 1], a);
          joins = false;
          halves = 2;
          i -= 2;  // back to the first half
          continue;
        }
        now = finish = earliest + costs.of_action(a);
      }
      start[i] = earliest;
      end[i] = finish;
      if (hands_on(a.kind)) {
        int const result = a.kind == kind::forward ? cell : cells + cell;
        int const to = a.kind == kind::forward ? stage + 1 : stage - 1;
        made[result] = finish;
        int const consumer = to >= 0 && to <= last_stage ? rank_of[to] : rank;
        if (consumer != rank) {
          int const boundary = to < stage ? to : stage;
          double takes = transfer[boundary * transfers];
          if constexpr (has_own_slices<Costs>)
            takes = costs.of_message(boundary, static_cast<int>(a.micro_batch));
          else if (!alike)
            takes *= costs.lengths.of_transfer(static_cast<int>(a.micro_batch));
          double leaves = sender ? now : finish;
          if (sender) now += takes;
          if (wired) {
            double& free_from = clock[plan.size.ranks + links.carrying(boundary, to > stage)];
            leaves = free_from > leaves ? free_from : leaves;
            free_from = leaves + takes;
          }
          made[result] = leaves + (receiver ? 0 : takes) + costs.of_latency(boundary);
          // A rank that waits for this result may go on.
          if (waits_for[consumer] == result) {
            waits_for[consumer] = -1;
            ready[ready_count++] = consumer;
          }
        }
      }
      if (halves > 0) --halves;
      if (halves == 0) earliest = now;
    }
    done += i - next[rank];
    next[rank] = i;
    clock[rank] = now;
  }
  state.clear_rest(plan, start, end);
  return done;
}

/// The timeline of a plan. \param costs a `cost_view`, or a type with costs of each single action
template <class Costs>
constexpr timeline simulate_once(plan_view const& plan, Costs const& costs) {
  int const total = plan.total();
  timeline result{buffer<double>(total), buffer<double>(total), false};
  wires const links(plan, costs);
  buffer<double> clock(plan.size.ranks + links.count, zeroed);
  result.complete = play(plan, costs, links, clock.data, result.start.data, result.end.data) == total;
  return result;
}

}  // namespace detail

/// The timeline of a plan under these costs: each action starts as soon as it can, and all ranks are free from time 0. Takes
/// O(actions).
constexpr timeline simulate(plan_view const& plan, cost_view const& costs) { return detail::simulate_once(plan, costs); }

/// The time from the first start to the last end over all ranks: that of a step when the optimizer waits for every rank.
constexpr double makespan(plan_view const& plan, timeline const& when) {
  double last = 0;
  for (int i = 0; i < plan.total(); ++i) last = when.end.data[i] > last ? when.end.data[i] : last;
  return last;
}

/// The time from a rank's first start to its last end; 0 for a rank without actions.
constexpr double span_of_rank(plan_view const& plan, timeline const& when, int rank) {
  if (plan.length(rank) == 0) return 0;
  return when.end.data[plan.begin[rank + 1] - 1] - when.start.data[plan.begin[rank]];
}

/// The longest time of a single rank from its first start to its last end: that of a step when consecutive steps overlap.
constexpr double span(plan_view const& plan, timeline const& when) {
  double longest = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    double const one = span_of_rank(plan, when, r);
    longest = one > longest ? one : longest;
  }
  return longest;
}

namespace detail {

/// `busy` for a `cost_view`, or a type with costs of each single action.
template <class Costs>
constexpr double busy_time(plan_view const& plan, Costs const& costs, int rank) {
  double sum = 0;
  int const stop = plan.begin[rank + 1];
  for (int i = plan.begin[rank]; i < stop;) {
    int const last = last_of_pair(plan.actions, i, stop);
    sum += last > i ? costs.of_pair(plan.actions[i], plan.actions[last]) : costs.of_action(plan.actions[i]);
    i = last + 1;
  }
  return sum;
}

}  // namespace detail

/// The time for which a rank computes, the same for any order of its actions.
constexpr double busy(plan_view const& plan, cost_view const& costs, int rank) { return detail::busy_time(plan, costs, rank); }

/// The share of `ranks × length` in which ranks do not compute: with `length` a makespan or a span.
constexpr double bubble(plan_view const& plan, cost_view const& costs, double length) {
  double sum = 0;
  for (int r = 0; r < plan.size.ranks; ++r) sum += busy(plan, costs, r);
  return length > 0 ? 1 - sum / (plan.size.ranks * length) : 0;
}

/// The makespan of a plan's timeline under these costs.
constexpr double makespan(plan_view const& plan, cost_view const& costs) { return makespan(plan, simulate(plan, costs)); }
/// The span of a plan's timeline under these costs.
constexpr double span(plan_view const& plan, cost_view const& costs) { return span(plan, simulate(plan, costs)); }
/// The share of the makespan in which ranks do not compute, by a plan and its costs.
constexpr double bubble_makespan(plan_view const& plan, cost_view const& costs) {
  return bubble(plan, costs, makespan(plan, costs));
}
/// The share of the span in which ranks do not compute, by a plan and its costs.
constexpr double bubble_span(plan_view const& plan, cost_view const& costs) { return bubble(plan, costs, span(plan, costs)); }

}  // namespace chevron
