#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/prove/idle.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/picture_messages.hpp>

/// \file
/// The figures of a plan or a picture for its header: lengths, bubbles, memory and messages.

namespace chevron::show {

/// The figures of a picture. Times are in the picture's unit.
struct figures {
  double makespan = 0;              ///< first start to last end over all rows
  double span = 0;                  ///< first start to last end on one row, the largest of all rows
  double bubble_makespan = 0;       ///< share of (number of rows × makespan) in which rows do not compute
  double bubble_span = 0;           ///< share of (number of rows × span) in which rows do not compute
  std::vector<int> peak_in_flight;  ///< per row: most chunks between the start of F and the end of B or W
  std::vector<double> busy;         ///< per row: time computing
  int messages = 0;                 ///< number of activations and gradients sent between ranks
  // Of plans only:
  double steady = 0;                     ///< time per step of many steps back to back; 0: not known
  double bubble_steady = 0;              ///< share of (number of rows × steady) in which rows do not compute
  std::vector<idle_time> idle;           ///< per row: time without computation, by cause
  std::vector<double> peak_share;        ///< per row: peak of microbatches in flight, slices by tokens; empty without slices
  std::vector<std::int64_t> peak_bytes;  ///< per row: most bytes of activations; empty if stages declare no sizes
  std::int64_t message_bytes = -1;       ///< bytes of all messages; -1 if stages declare no sizes
};

/// Computes the figures of any picture, from its boxes.
template <class = void>
figures figures_of(picture const& p) {
  figures out;
  std::size_t const rows = static_cast<std::size_t>(std::max(p.rows, 0));
  std::vector<double> first(rows), last(rows);
  std::vector<bool> any(rows);
  out.busy.resize(rows);
  out.peak_in_flight.resize(rows);
  double end = 0;
  double const start = first_start(p);
  double total = 0;
  for (box const& b : p.boxes) {
    if (!is_compute(b.op.kind)) continue;
    std::size_t const r = static_cast<std::size_t>(b.rank);
    first[r] = any[r] ? std::min(first[r], b.start) : b.start;
    last[r] = any[r] ? std::max(last[r], b.end) : b.end;
    any[r] = true;
    end = std::max(end, b.end);
    if (b.of_pair == half::second) continue;
    out.busy[r] += b.end - b.start;
    total += b.end - b.start;
  }
  out.makespan = end - start;
  for (std::size_t r = 0; r < rows; ++r) out.span = std::max(out.span, last[r] - first[r]);
  if (out.makespan > 0) out.bubble_makespan = 1 - total / (static_cast<double>(rows) * out.makespan);
  if (out.span > 0) out.bubble_span = 1 - total / (static_cast<double>(rows) * out.span);
  for (in_flight_point const& c : in_flight_over_time(p)) {
    int& peak = out.peak_in_flight[static_cast<std::size_t>(c.rank)];
    peak = std::max(peak, c.chunks);
  }
  out.messages = static_cast<int>(messages_of(p).size());
  return out;
}

/// Computes the figures of a plan by the analyses of prove/; also in bytes, if `sizes` declares any.
template <class = void>
figures figures_of(plan_view const& plan, cost_view const& costs, size_view const& sizes = {}) {
  timeline const when = simulate(plan, costs);
  figures out;
  out.makespan = makespan(plan, when);
  out.span = span(plan, when);
  out.steady = steady_step_time(plan, costs).most;
  out.bubble_makespan = bubble(plan, costs, out.makespan);
  out.bubble_span = bubble(plan, costs, out.span);
  out.bubble_steady = bubble(plan, costs, out.steady);
  buffer<idle_time> const idle = idle_times(plan, costs, when);
  length_view const slices = slice_factors(plan, costs);
  for (int r = 0; r < plan.size.ranks; ++r) {
    out.idle.push_back(idle.data[r]);
    out.peak_in_flight.push_back(peak_in_flight(plan, r));
    if (!slices.alike()) out.peak_share.push_back(peak_share(plan, slices, r));
    if (sizes.activation != nullptr) out.peak_bytes.push_back(peak_bytes(plan, sizes, r, slices));
    out.busy.push_back(busy(plan, costs, r));
  }
  out.messages = messages(plan);
  if (sizes.message != nullptr) out.message_bytes = message_bytes(plan, sizes);
  return out;
}

}  // namespace chevron::show
