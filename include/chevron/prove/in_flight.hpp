#pragma once

#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Chunks in flight over time.

namespace chevron {

/// From this time on, a rank has so many chunks in flight.
struct in_flight_from {
  double time = 0;
  int chunks = 0;
};

/// The chunks in flight of a rank over time, under a complete timeline: one entry for each F, at its start, and one for
/// each B or W, at its end, in the order of time. Of a pair, the forward's chunk is there before the backward's is gone.
constexpr buffer<in_flight_from> in_flight_over_time(plan_view const& plan, timeline const& when, int rank) {
  int const stop = plan.begin[rank + 1];
  int count = 0;
  for (int i = plan.begin[rank]; i < stop; ++i) count += in_flight_change(plan.actions[i].kind, plan.forward_only) != 0 ? 1 : 0;
  buffer<in_flight_from> result(count);
  int now = 0;
  int filled = 0;
  for (int i = plan.begin[rank]; i < stop; ++i) {
    int const change = in_flight_change(plan.actions[i].kind, plan.forward_only);
    if (change == 0) continue;
    now += change;
    result.data[filled++] = {change > 0 ? when.start.data[i] : when.end.data[i], now};
  }
  return result;
}

}  // namespace chevron
