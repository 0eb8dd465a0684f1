#pragma once

#include <string>
#include <vector>

#include <chevron/show/format.hpp>
#include <chevron/show/picture.hpp>

/// \file
/// A schedule and its numbers as JSON, for programs.

namespace chevron::show {

namespace detail {
template <class Values, class Spell>
std::string json_list(Values const& values, Spell spell) {
  std::string out = "[";
  for (auto const& value : values) out += (out.size() > 1 ? ", " : "") + spell(value);
  return out + "]";
}
}  // namespace detail

/// The keys are a promise: `schedule ranks chunks micro_batches makespan span bubble_makespan bubble_span peak_in_flight
/// messages stages busy costs actions`. Times are in the costs' unit, bubbles are shares from 0 to 1, `peak_in_flight` (chunks)
/// and `busy` have one entry a rank, `actions` one list of strings such as `"3F0"` a rank, `costs` one entry a stage.
inline std::string json(plan_view const& plan, cost_view const& costs) {
  figures const f = figures_of(plan, costs);
  std::vector<int> each(static_cast<std::size_t>(plan.stages));
  for (int s = 0; s < plan.stages; ++s) each[static_cast<std::size_t>(s)] = s;
  auto const cost_list = [&](kind what) { return detail::json_list(each, [&](int s) { return exact(costs.of(what, s)); }); };
  std::string out = "{\n";
  auto const entry = [&](char const* key, std::string const& value) {
    out += std::string(out.size() > 2 ? ",\n" : "") + "  \"" + key + "\": " + value;
  };
  entry("schedule", json_string(plan.name));
  entry("ranks", std::to_string(plan.size.ranks));
  entry("chunks", std::to_string(plan.size.chunks));
  entry("stages", std::to_string(plan.stages));
  entry("micro_batches", std::to_string(plan.size.micro_batches));
  entry("makespan", exact(f.makespan));
  entry("span", exact(f.span));
  entry("bubble_makespan", exact(f.bubble_makespan));
  entry("bubble_span", exact(f.bubble_span));
  entry("peak_in_flight", detail::json_list(f.peak_in_flight, [](int n) { return std::to_string(n); }));
  entry("messages", std::to_string(f.messages));
  entry("busy", detail::json_list(f.busy, [](double t) { return exact(t); }));
  entry("costs", "{\"forward\": " + cost_list(kind::forward) + ", \"backward_input\": " + cost_list(kind::backward_input) +
                     ", \"backward_weight\": " + cost_list(kind::backward_weight) +
                     ", \"communication\": " + exact(costs.of_message(0)) + "}");
  std::string lists;
  for (int r = 0; r < plan.size.ranks; ++r) {
    lists += std::string(r > 0 ? "," : "") + "\n    [";
    for (int i = 0; i < plan.length(r); ++i) lists += (i > 0 ? ", " : "") + json_string(to_text(plan.at(r, i)).view());
    lists += "]";
  }
  entry("actions", "[" + lists + "\n  ]");
  return out + "\n}\n";
}

}  // namespace chevron::show
