#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// When each action of a plan runs if every action starts as soon as it can: makespan, span and bubble are read off here.

namespace chevron {

/// Start and end of each action, in the costs' unit, indexed as `plan_view::actions`. The earliest start is 0.
struct timeline {
  buffer<double> start;
  buffer<double> end;
  /// False when the plan deadlocks: actions that never ran then have start and end 0.
  bool complete = false;
};

/// Runs a plan as an event simulation, O(actions): each rank goes through its list and waits only for what the next action needs.
constexpr timeline simulate(plan_view const& plan, cost_view const& costs) {
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.micro_batches;
  int const last_stage = plan.stages - 1;
  int const total = plan.begin[ranks];
  timeline result{buffer<double>(total), buffer<double>(total), false};

  // End times of forwards and of input gradients (B or I), by stage and microbatch; negative: not yet.
  int const cells = plan.stages * micro_batches;
  buffer<double> forward_end_memory(cells);
  buffer<double> backward_end_memory(cells);
  buffer<int> next_memory(ranks);
  buffer<int> waits_for_memory(ranks);
  buffer<int> ready_memory(ranks);
  buffer<double> clock_memory(ranks, zeroed);
  double* const forward_end = forward_end_memory.data;
  double* const backward_end = backward_end_memory.data;
  int* const next = next_memory.data;
  int* const waits_for = waits_for_memory.data;  // cell awaited: forward cells from 0, backward cells from `cells`; -1: nothing
  int* const ready = ready_memory.data;
  double* const clock = clock_memory.data;
  double* const start = result.start.data;
  double* const end = result.end.data;
  action const* const actions = plan.actions;
  for (int i = 0; i < cells; ++i) {
    forward_end[i] = -1;
    backward_end[i] = -1;
  }
  int ready_count = 0;
  for (int r = ranks - 1; r >= 0; --r) {
    next[r] = plan.begin[r];
    waits_for[r] = -1;
    ready[ready_count++] = r;
  }

  int done = 0;
  while (ready_count > 0) {
    int const rank = ready[--ready_count];
    int const stop = plan.begin[rank + 1];
    int i = next[rank];
    double now = clock[rank];
    waits_for[rank] = -1;
    for (; i < stop; ++i) {
      action const a = actions[i];
      int const stage = static_cast<int>(a.stage);
      int const cell = stage * micro_batches + static_cast<int>(a.micro_batch);
      double earliest = now;
      int producer = -1;
      if (a.what == kind::forward) {
        if (stage > 0) {
          producer = plan.rank_of[stage - 1];
          double const ready_at = forward_end[cell - micro_batches];
          if (ready_at < 0) {
            waits_for[rank] = cell - micro_batches;
            break;
          }
          double const arrives = producer == rank ? ready_at : ready_at + costs.communication;
          if (arrives > earliest) earliest = arrives;
        }
      } else if (a.what == kind::backward || a.what == kind::backward_input) {
        if (forward_end[cell] < 0) {
          waits_for[rank] = cell;
          break;
        }
        if (stage < last_stage) {
          producer = plan.rank_of[stage + 1];
          double const ready_at = backward_end[cell + micro_batches];
          if (ready_at < 0) {
            waits_for[rank] = cells + cell + micro_batches;
            break;
          }
          double const arrives = producer == rank ? ready_at : ready_at + costs.communication;
          if (arrives > earliest) earliest = arrives;
        }
      } else if (backward_end[cell] < 0) {
        waits_for[rank] = cells + cell;
        break;
      }
      now = earliest + costs.of(a.what, stage);
      start[i] = earliest;
      end[i] = now;
      ++done;
      // Whoever waits for exactly this may go on.
      if (a.what == kind::forward) {
        forward_end[cell] = now;
        if (stage < last_stage) {
          int const consumer = plan.rank_of[stage + 1];
          if (waits_for[consumer] == cell && consumer != rank) {
            waits_for[consumer] = -1;
            ready[ready_count++] = consumer;
          }
        }
      } else if (a.what != kind::backward_weight) {
        backward_end[cell] = now;
        if (stage > 0) {
          int const consumer = plan.rank_of[stage - 1];
          if (waits_for[consumer] == cells + cell && consumer != rank) {
            waits_for[consumer] = -1;
            ready[ready_count++] = consumer;
          }
        }
      }
    }
    next[rank] = i;
    clock[rank] = now;
  }
  result.complete = done == total;
  for (int r = 0; r < ranks; ++r) {
    for (int i = next[r]; i < plan.begin[r + 1]; ++i) start[i] = end[i] = 0;
  }
  return result;
}

/// First start to last end over all ranks: what a step costs when the optimizer waits for every rank.
constexpr double makespan(plan_view const& plan, timeline const& when) {
  double last = 0;
  for (int i = 0; i < plan.total(); ++i) last = when.end.data[i] > last ? when.end.data[i] : last;
  return last;
}

/// One rank's first start to last end.
constexpr double span_of_rank(plan_view const& plan, timeline const& when, int rank) {
  if (plan.length(rank) == 0) return 0;
  return when.end.data[plan.begin[rank + 1] - 1] - when.start.data[plan.begin[rank]];
}

/// The longest single rank's first start to last end: what a step costs when consecutive steps overlap.
constexpr double span(plan_view const& plan, timeline const& when) {
  double longest = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    double const one = span_of_rank(plan, when, r);
    longest = one > longest ? one : longest;
  }
  return longest;
}

/// Time a rank computes, whatever the order.
constexpr double busy(plan_view const& plan, cost_view const& costs, int rank) {
  double sum = 0;
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i)
    sum += costs.of(plan.actions[i].what, static_cast<int>(plan.actions[i].stage));
  return sum;
}

/// The share of `ranks × length` in which ranks do not compute: with `length` a makespan or a span.
constexpr double bubble(plan_view const& plan, cost_view const& costs, double length) {
  double sum = 0;
  for (int r = 0; r < plan.size.ranks; ++r) sum += busy(plan, costs, r);
  return length > 0 ? 1 - sum / (plan.size.ranks * length) : 0;
}

constexpr double makespan(plan_view const& plan, cost_view const& costs) { return makespan(plan, simulate(plan, costs)); }
constexpr double span(plan_view const& plan, cost_view const& costs) { return span(plan, simulate(plan, costs)); }
constexpr double bubble_makespan(plan_view const& plan, cost_view const& costs) {
  return bubble(plan, costs, makespan(plan, costs));
}
constexpr double bubble_span(plan_view const& plan, cost_view const& costs) { return bubble(plan, costs, span(plan, costs)); }

}  // namespace chevron
