#pragma once

#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// The number of chunks in flight over time.

namespace chevron {

/// A rank's number of chunks in flight, from `time` until the time of the next entry.
struct in_flight_from {
  double time = 0;
  int chunks = 0;
};

/// A rank's chunks in flight over time, for a complete timeline: one entry for each F, at its start, and one for each B or W, at
/// its end, in the order of time. In a fused pair, F's chunk is added before B's is removed.
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
