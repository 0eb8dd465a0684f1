#include "measure.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>

#include <chevron/prove/memory.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/show/format.hpp>

#include "console.hpp"

namespace chevron::train {
namespace {

struct read_step {
  long step = 0;
  double seconds = 0;
  int peak = 0;
  std::vector<recorded> entries;
};

std::vector<read_step> steps_of(std::string const& text) {
  std::istringstream in(text);
  std::vector<read_step> out;
  std::size_t count = 0;
  for (read_step one; in >> one.step >> one.seconds >> one.peak >> count;) {
    one.entries.resize(count);
    for (recorded& r : one.entries) {
      int what = 0, stage = 0, micro_batch = 0;
      in >> what >> stage >> micro_batch >> r.reached >> r.start >> r.end;
      r.what = make_action(static_cast<kind>(what), stage, micro_batch);
    }
    out.push_back(std::move(one));
    one = {};
  }
  return out;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double seconds_between(std::int64_t from, std::int64_t to) { return static_cast<double>(to - from) * 1e-9; }

/// A message's time at its receiver: from the moment the action that needs it was reached until it could start.
std::optional<action> received_by(plan_view const& plan, action a) {
  int const stage = static_cast<int>(a.stage);
  if (a.what == kind::forward && stage > 0 && plan.rank_of[stage - 1] != plan.rank_of[stage]) {
    return make_action(kind::receive_forward, stage, static_cast<int>(a.micro_batch));
  }
  if ((a.what == kind::backward || a.what == kind::backward_input) && stage + 1 < plan.stages &&
      plan.rank_of[stage + 1] != plan.rank_of[stage]) {
    return make_action(kind::receive_backward, stage, static_cast<int>(a.micro_batch));
  }
  return std::nullopt;
}

}  // namespace

void step_records::keep(record const& of, double seconds) {
  if (steps_.size() == kept) steps_.pop_front();
  steps_.push_back({of.step(), seconds, of.peak_in_flight(), {of.entries().begin(), of.entries().end()}});
}

std::string step_records::text() const {
  std::ostringstream out;
  for (one const& s : steps_) {
    out << s.step << ' ' << s.seconds << ' ' << s.peak_in_flight << ' ' << s.entries.size() << '\n';
    for (recorded const& r : s.entries) {
      out << static_cast<int>(r.what.what) << ' ' << r.what.stage << ' ' << r.what.micro_batch << ' ' << r.reached << ' '
          << r.start << ' ' << r.end << '\n';
    }
  }
  return out.str();
}

comparison compared(program_view const& program, std::vector<std::string> const& texts, bool steps_overlap) {
  plan_view const& plan = program.plan;
  auto const stages = static_cast<std::size_t>(plan.stages);
  std::vector<std::vector<read_step>> all;
  for (auto const& text : texts) all.push_back(steps_of(text));

  comparison out;
  // Costs: the median over the last steps, microbatches and replicas.
  std::vector<std::vector<double>> durations(stages * compute_kinds);
  for (auto const& of_rank : all) {
    for (auto const& step : of_rank) {
      for (recorded const& r : step.entries) {
        if (is_compute(r.what.what))
          durations[r.what.stage * compute_kinds + static_cast<std::size_t>(r.what.what)].push_back(
              seconds_between(r.start, r.end));
      }
    }
  }
  std::vector<double> input(stages), weight(stages);
  for (std::size_t s = 0; s < stages; ++s) {
    auto const cost = [&](kind k) { return median(durations[s * compute_kinds + static_cast<std::size_t>(k)]); };
    out.forward.push_back(cost(kind::forward));
    out.backward.push_back(cost(kind::backward));
    out.input_gradient.push_back(cost(kind::backward_input));
    out.weight_gradient.push_back(cost(kind::backward_weight));
    // A stage has B, or I and W; the cost model wants the two parts, and only their sum counts for a B.
    input[s] = out.backward[s] + out.input_gradient[s];
    weight[s] = out.weight_gradient[s];
  }

  cost_view const costs{out.forward.data(), input.data(), weight.data(), 1};
  timeline const when = simulate(plan, costs);
  out.predicted_pipeline = makespan(plan, when);
  out.predicted_bubble = bubble(plan, costs, out.predicted_pipeline);
  if (steps_overlap) out.predicted_step = steady_step_time(plan, costs).most;
  for (int r = 0; r < plan.size.ranks; ++r) out.predicted_peak.push_back(peak_in_flight(plan, r));
  out.predicted = show::scaled(show::picture_of(plan, when, "predicted from measured costs"), 1e3, "ms");
  out.predicted.microseconds = 1e3;

  // Steps: every rank kept the same ones.
  std::size_t const steps = all.front().size();
  out.steps = static_cast<int>(steps);
  std::vector<double> lengths, bubbles, whole;
  for (std::size_t k = 0; k < steps; ++k) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0;
    double busy = 0;
    for (auto const& of_rank : all) {
      for (recorded const& r : of_rank[k].entries) {
        if (!is_compute(r.what.what)) continue;
        first = std::min(first, r.start);
        last = std::max(last, r.end);
        busy += seconds_between(r.start, r.end);
      }
    }
    lengths.push_back(seconds_between(first, last));
    bubbles.push_back(1 - busy / (static_cast<double>(all.size()) * lengths.back()));
    whole.push_back(all.front()[k].seconds);
  }
  out.measured_pipeline = median(lengths);
  out.measured_bubble = median(bubbles);
  out.measured_step = median(whole);
  auto const typical =
      static_cast<std::size_t>(std::find(lengths.begin(), lengths.end(), out.measured_pipeline) - lengths.begin());
  out.typical_step = all.front()[typical].step;

  out.measured = out.predicted;
  out.measured.title = "measured, step " + std::to_string(out.typical_step);
  out.measured.rows = static_cast<int>(all.size());
  out.measured.boxes.clear();
  std::int64_t zero = std::numeric_limits<std::int64_t>::max();
  for (auto const& of_rank : all) {
    for (recorded const& r : of_rank[typical].entries) {
      if (is_compute(r.what.what)) zero = std::min(zero, r.start);
    }
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    read_step const& step = all[rank][typical];
    int peak = 0;
    for (auto const& s : all[rank]) peak = std::max(peak, s.peak);
    out.measured_peak.push_back(peak);
    for (recorded const& r : step.entries) {
      // Posting a receive takes no time; the wait for it does, and is drawn where it is.
      if (r.what.what == kind::receive_forward || r.what.what == kind::receive_backward) continue;
      auto const box = [&](action what, std::int64_t from, std::int64_t to) {
        int const chunk = is_compute(what.what) ? plan.chunk_of(static_cast<int>(what.stage)) : 0;
        out.measured.boxes.push_back({static_cast<int>(rank), 1e3 * seconds_between(zero, from), 1e3 * seconds_between(zero, to),
                                      what, chunk, static_cast<int>(out.typical_step)});
      };
      if (is_compute(r.what.what)) {
        if (auto const message = received_by(plan, r.what)) box(*message, r.reached, r.start);
        box(r.what, r.start, r.end);
      } else {
        box(r.what, r.reached, r.end);
      }
    }
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
  row("pipeline, first F to last B or W", duration(c.predicted_pipeline), duration(c.measured_pipeline),
      show::fixed(c.measured_pipeline / c.predicted_pipeline, 2) + " times the prediction");
  row("bubble", show::percent(c.predicted_bubble), show::percent(c.measured_bubble));
  for (std::size_t r = 0; r < ranks; ++r) {
    int most = 0;
    std::string who;
    for (std::size_t g = r; g < c.measured_peak.size(); g += ranks) {
      most = std::max(most, c.measured_peak[g]);
      who += (who.empty() ? "" : ", ") + std::to_string(g);
    }
    row((r == 0 ? "peak in flight, rank " : "                rank ") + who, std::to_string(c.predicted_peak[r]),
        std::to_string(most), r == 0 ? "chunks" : "");
  }
  row("whole step", c.predicted_step > 0 ? duration(c.predicted_step) : "-", duration(c.measured_step),
      c.predicted_step > 0 ? "back to back: the next begins before all ranks are done" : "with gradient sums and optimizer");

  out += "\n  Measured: the median of the last " + std::to_string(c.steps) + (c.steps == 1 ? " step" : " steps") +
         ". Predicted: the schedule, simulated with the\n  median time of each action in these steps:\n";
  for (std::size_t s = 0; s < c.forward.size(); ++s) {
    out += "    stage " + std::to_string(s) + "   F " + duration(c.forward[s]);
    if (c.backward[s] > 0) out += "   B " + duration(c.backward[s]);
    if (c.input_gradient[s] > 0) out += "   I " + duration(c.input_gradient[s]) + "   W " + duration(c.weight_gradient[s]);
    out += "\n";
  }
  if (!shared_cores.empty()) out += "  " + shared_cores + "\n";
  return out;
}

}  // namespace chevron::train
