#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/prove/critical_path.hpp>
#include <chevron/prove/in_flight.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// A schedule and its numbers as JSON, for programs. Written as text, since <chevron/show.hpp> includes no library for JSON.

namespace chevron::show {

namespace detail {

/// Writes the entries for the lengths of a step and their bubbles, which several objects have.
template <class Entry>
void length_entries(figures const& f, Entry const& entry) {
  entry("makespan", exact(f.makespan));
  entry("span", exact(f.span));
  entry("steady_step_time", exact(f.steady));
  entry("bubble_makespan", exact(f.bubble_makespan));
  entry("bubble_span", exact(f.bubble_span));
  entry("bubble_steady", exact(f.bubble_steady));
}

}  // namespace detail

/// A plan and its figures as JSON. Later versions keep these keys. Times are in the costs' unit, bubbles are shares from 0 to
/// 1, and lists have one entry for each rank if nothing else is said:
///
/// - `schedule ranks chunks stages micro_batches slices`;
/// - `makespan span` of one step, `steady_step_time` of each of many steps back to back, and their bubbles, `bubble_makespan
///   bubble_span bubble_steady`; `steps`, and `makespan_of_steps` of this number of steps without a barrier between them;
/// - `busy`, `idle` as objects of `fill steady drain communicating`;
/// - `peak_in_flight` in chunks, with slices also `peak_share` in microbatches, `in_flight_over_time` as lists of `[time, chunks
///   from then on]`, `peak_bytes`; `messages` and `message_bytes` of a step; bytes are null if stages declare no sizes;
/// - `critical_path` as a list of objects of `action rank start end communicating` in the order of time;
/// - `costs` of a microbatch with factor 1: `forward backward_input backward_weight` and, if the plan has an R, `recompute` by
///   stage, `communication` and `latency` by boundary, `communication_occupies` and `hidden`; if microbatches have unequal
///   lengths, also `computation_factors` and `transfer_factors` with one entry for each microbatch or slice, and `attention`,
///   the share of computations in which W has no part;
/// - `actions` as strings such as `"3F0"`, with slices `"3F0.1"`; a fused pair is one string, `"(0F7;7B3)OVERLAP_F_B"`.
inline std::string json(plan_view const& plan, cost_view const& costs, size_view const& sizes = {}, int steps = 1) {
  figures const f = figures_of(plan, costs, sizes);
  timeline const when = simulate(plan, costs);
  std::vector<int> each(static_cast<std::size_t>(plan.stages));
  for (int s = 0; s < plan.stages; ++s) each[static_cast<std::size_t>(s)] = s;
  std::vector<int> boundaries = each;
  if (!boundaries.empty()) boundaries.pop_back();
  auto const cost_list = [&](kind what) { return json_list(each, [&](int s) { return exact(costs.of(what, s)); }); };
  auto const spell = [&](int i) {
    action const a = plan.actions[i];
    int const slices = plan.size.slices;
    text const words = a.fused != 0 ? to_text(fused_pair{a, plan.actions[i + 1]}, slices) : to_text(a, slices);
    return json_string(words.view());
  };
  std::string out = "{\n";
  auto const entry = [&](char const* key, std::string const& value) {
    out += std::string(out.size() > 2 ? ",\n" : "") + "  \"" + key + "\": " + value;
  };
  entry("schedule", json_string(plan.name));
  size_entries(plan.size, plan.stages, entry);
  entry("slices", std::to_string(plan.size.slices));
  detail::length_entries(f, entry);
  entry("steps", std::to_string(steps));
  entry("makespan_of_steps", exact(steps == 1 ? f.makespan : makespan(back_to_back(plan, steps), costs)));
  entry("peak_in_flight", json_list(f.peak_in_flight, [](int n) { return std::to_string(n); }));
  if (!f.peak_share.empty()) entry("peak_share", json_list(f.peak_share, exact));
  entry("peak_bytes",
        sizes.activation == nullptr ? "null" : json_list(f.peak_bytes, [](std::int64_t n) { return std::to_string(n); }));
  entry("messages", std::to_string(f.messages));
  entry("message_bytes", sizes.message == nullptr ? "null" : std::to_string(f.message_bytes));
  entry("busy", json_list(f.busy, exact));
  entry("idle", json_list(f.idle, [](idle_time const& t) {
          return "{\"fill\": " + exact(t.fill) + ", \"steady\": " + exact(t.steady) + ", \"drain\": " + exact(t.drain) +
                 ", \"communicating\": " + exact(t.communicating) + "}";
        }));
  auto const path_entry = [&](path_step const& step) {
    return "\n    {\"action\": " + spell(step.action) + ", \"rank\": " + std::to_string(step.rank) +
           ", \"start\": " + exact(when.start.data[step.action]) + ", \"end\": " + exact(when.end.data[step.action]) +
           ", \"communicating\": " + exact(step.communicating) + "}";
  };
  entry("critical_path", json_list(critical_path_of(plan, costs, when), path_entry, ","));
  entry("costs", "{\"forward\": " + cost_list(kind::forward) + ", \"backward_input\": " + cost_list(gradient_kind(true)) +
                     ", \"backward_weight\": " + cost_list(kind::backward_weight) +
                     (plan.holds(kind::recompute) ? ", \"recompute\": " + cost_list(kind::recompute) : "") +
                     ", \"communication\": " + json_list(boundaries, [&](int s) { return exact(costs.of_message(s)); }) +
                     ", \"latency\": " + json_list(boundaries, [&](int s) { return exact(costs.of_latency(s)); }) +
                     ", \"communication_occupies\": \"" + name_of(costs.communication_occupies) +
                     "\", \"hidden\": " + exact(costs.hidden) + "}");
  if (!costs.lengths.alike()) {
    length_factors const factors = factors_of(costs.lengths, plan.size.units());
    entry("computation_factors", json_list(factors.computation, exact));
    entry("transfer_factors", json_list(factors.transfer, exact));
    if (factors.attention > 0) entry("attention", exact(factors.attention));
  }
  std::string over_time;
  for (int r = 0; r < plan.size.ranks; ++r) {
    auto const point = [](in_flight_from const& now) { return "[" + exact(now.time) + ", " + std::to_string(now.chunks) + "]"; };
    over_time += std::string(r > 0 ? "," : "") + "\n    " + json_list(in_flight_over_time(plan, when, r), point);
  }
  entry("in_flight_over_time", "[" + over_time + "\n  ]");
  std::string lists;
  for (int r = 0; r < plan.size.ranks; ++r) {
    lists += std::string(r > 0 ? "," : "") + "\n    [";
    int const stop = plan.begin[r + 1];
    for (int i = plan.begin[r]; i < stop; i = last_of_pair(plan.actions, i, stop) + 1)
      lists += (i > plan.begin[r] ? ", " : "") + spell(i);
    lists += "]";
  }
  entry("actions", "[" + lists + "\n  ]");
  return out + "\n}\n";
}

}  // namespace chevron::show
