#include "measure.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <chevron/base/format.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/profile/measured_picture.hpp>

#include "common/console.hpp"

namespace chevron::train {
comparison compared(program_view const& program, std::vector<std::string> const& texts, int shards, bool steps_overlap) {
  plan_view const& plan = program.plan;
  all_steps const all = steps_of(texts, shards);
  comparison out;
  out.shards = shards;
  out.measured = profile_of(plan, all);
  out.for_file = profile_of(plan, all, profiled_times::microbatches);

  profiled_costs const costs = costs_of(out.measured, split_stages(plan));
  timeline const when = simulate(plan, costs.view());
  out.predicted_pipeline = makespan(plan, when);
  out.predicted_bubble = bubble(plan, costs.view(), out.predicted_pipeline);
  if (steps_overlap) out.predicted_step = steady_step_time(plan, costs.view()).most;
  for (int r = 0; r < plan.size.ranks; ++r) out.predicted_peak.push_back(peak_in_flight(plan, r));
  out.predicted_picture = show::picture_of(plan, costs.view(), "predicted from measured costs");
  out.predicted_facts = show::facts_of(plan, costs.view());
  out.predicted_picture.unit = "ms";
  out.predicted_picture.ranks_apart = shards;

  auto const ranks = static_cast<std::size_t>(plan.size.ranks);
  std::vector<double> bubbles;
  std::size_t typical = 0;
  double nearest = std::numeric_limits<double>::max();
  for (std::size_t k = 0; k < all.front().size(); ++k) {
    for (std::size_t g = 0; g < all.size(); g += ranks) {
      auto const [first, last] = pipeline_of(all, k, g, ranks);
      double const length = seconds_between(first, last);
      double busy = 0;
      for (std::size_t r = g; r < g + ranks; ++r) {
        each_computation(all[r][k].entries,
                         [&](trace_event const& one, trace_event const* other, std::int64_t start, std::int64_t end) {
                           // Halves that ran one after the other may have waited in between.
                           bool const apart = other != nullptr && other->start >= one.end;
                           busy += apart ? seconds_between(one.start, one.end) + seconds_between(other->start, other->end)
                                         : seconds_between(start, end);
                         });
      }
      bubbles.push_back(1 - busy / (static_cast<double>(ranks) * length));
      if (double const off = std::abs(1e3 * length - out.measured.pipeline); off < nearest) {
        nearest = off;
        typical = k;
      }
    }
  }
  out.measured_bubble = median(bubbles);
  out.typical_step = all.front()[typical].step;
  out.measured_picture = show::measured_picture(plan, all, typical);
  out.measured_picture.ranks_apart = shards;
  for (auto const& of_rank : all) {
    int peak = 0;
    allocator_use memory;
    for (auto const& step : of_rank) {
      peak = std::max(peak, step.peak_in_flight);
      memory.add(step.memory);
    }
    out.measured_peak.push_back(peak);
    out.memory.push_back(memory);
  }
  return out;
}

std::string table_of(comparison const& c, std::string const& shared_cores) {
  std::string out;
  auto const row = [&](std::string const& name, std::string const& predicted, std::string const& measured,
                       std::string const& remark = "") {
    auto const right = [](std::string const& s, int width) {
      return std::string(static_cast<std::size_t>(std::max(0, width - show::columns_of(s))), ' ') + s;
    };
    std::string line = "  " + name + std::string(static_cast<std::size_t>(std::max(1, 32 - show::columns_of(name))), ' ') +
                       right(predicted, 10) + right(measured, 12) + (remark.empty() ? "" : "   " + remark);
    while (!line.empty() && line.back() == ' ') line.pop_back();
    out += line + "\n";
  };
  std::size_t const ranks = c.predicted_peak.size();
  row("", "predicted", "measured");
  auto const time = [](double milliseconds) { return duration(milliseconds * 1e-3); };
  profile const& m = c.measured;
  row("pipeline, first F to last B or W", time(c.predicted_pipeline), time(m.pipeline),
      show::fixed(m.pipeline / c.predicted_pipeline, 3) + " times the prediction");
  row("bubble", show::percent(c.predicted_bubble), show::percent(c.measured_bubble));
  for (std::size_t r = 0; r < ranks; ++r) {
    int most = 0;
    std::string who;
    for (std::size_t g = r; g < c.measured_peak.size(); g += ranks) {
      most = std::max(most, c.measured_peak[g]);
      who += (who.empty() ? "" : ", ") + std::to_string(g * static_cast<std::size_t>(c.shards));
    }
    row((r == 0 ? "peak in flight, rank " : "                rank ") + who, std::to_string(c.predicted_peak[r]),
        std::to_string(most), r == 0 ? "chunks" : "");
  }
  for (std::size_t g = 0; g < c.memory.size() && c.memory.front().active > 0; ++g) {
    auto const text = [](std::int64_t bytes) { return show::fixed(static_cast<double>(bytes) / (1 << 20), 1); };
    row((g == 0 ? "peak memory, rank " : "             rank ") + std::to_string(g * static_cast<std::size_t>(c.shards)),
        text(c.memory[g].planned), text(c.memory[g].active),
        g == 0 ? "MiB; predicted: memory of chunks in flight, and memory between steps" : "");
  }
  row("whole step", c.predicted_step > 0 ? time(c.predicted_step) : "-", time(m.step),
      c.predicted_step > 0 ? "back to back: the next begins before all ranks are done" : "with gradient sums and optimizer");

  out += "\n  Measured: the median of the last " + std::to_string(m.steps) + (m.steps == 1 ? " step" : " steps") +
         ". Predicted: the schedule, simulated with the\n  median time of each action and message in these steps:\n";
  for (std::size_t s = 0; s < m.forward.size(); ++s) {
    out += "    stage " + std::to_string(s) + "   F " + time(m.forward[s]);
    if (m.backward[s] >= 0) out += "   B " + time(m.backward[s]);
    if (m.backward_input[s] >= 0) out += "   I " + time(m.backward_input[s]) + "   W " + time(m.backward_weight[s]);
    if (s < m.communication.size() && m.communication[s] >= 0)
      out += "   to and from stage " + std::to_string(s + 1) + " " + time(m.communication[s]);
    out += "\n";
  }
  if (!shared_cores.empty()) out += "  " + shared_cores + "\n";
  return out;
}

}  // namespace chevron::train
