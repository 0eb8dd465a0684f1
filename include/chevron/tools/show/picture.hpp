#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/critical_path.hpp>
#include <chevron/prove/idle.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// A picture: boxes in time, one row for each rank. A plan's simulation and a measured trace both become a `picture`, so that
/// every drawing treats "predicted" and "measured" alike.
// The larger functions are templates, so that only programs that draw compile them: <chevron/schedule.hpp> includes them.

namespace chevron::show {

/// Which half of a fused pair a box is. The two halves are next to each other in the list of boxes, with the same start and end.
enum class half : unsigned char { none, first, second };

/// The progress of an action when a run failed.
enum class progress : unsigned char { unknown, done, waiting, under_way, not_begun };

/// The box of one action: its row, and its start and end in time.
struct box {
  int rank = 0;      ///< row: pipeline rank, or global rank (replica × P + pipeline rank) with replicas
  double start = 0;  ///< `start` and `end`: in the picture's unit of time
  double end = 0;
  action op{};    ///< of any kind: computation, message, gradient sum, optimizer
  int chunk = 0;  ///< index of the stage among its rank's stages, from the input side
  int step = 0;   ///< number of the training step, in a picture of several
  half of_pair = half::none;
  progress so_far = progress::unknown;
};

/// A list of boxes, and the words that label them.
struct picture {
  std::string title;     ///< `predicted`, `measured` …; shown if several pictures share an axis
  std::string schedule;  ///< the schedule's name in the catalogue
  shape size{};          ///< pipeline ranks, microbatches, chunks
  int stages = 0;
  int rows = 0;                ///< pipeline ranks × replicas
  bool forward_only = false;   ///< evaluation: no chunk remains in flight
  std::string unit;            ///< unit of time: `s`, `ms` …; empty: the costs' own unit
  double microseconds = 1000;  ///< length of one unit of time in a trace; without a unit, a cost of 1 is drawn as 1 ms
  std::vector<box> boxes;
  int steps = 1;                   ///< number of training steps drawn
  std::vector<int> critical_path;  ///< indices of boxes, in the order of time; empty if it is not known

  // Only of a run that has failed:
  std::string note;                        ///< the run's outcome, shown instead of the plan's figures
  std::vector<std::string> row_notes;      ///< by row: words at the row's right end
  std::vector<std::pair<int, int>> waits;  ///< pairs of boxes: a waiting box, and the box that it waits for
  int awaited = -1;                        ///< the box for which all waiting ranks wait in the end; -1: none
  int first_rank = 0;                      ///< global rank of the first row: not 0 in a replica or a shard other than the first
  int ranks_apart = 1;                     ///< difference of global ranks from row to row: a stage's number of shards
};

/// Finds fused pairs among neighbouring boxes: an F that is marked as fused, and its other half at the same time on the same row.
template <class = void>
void mark_pairs(picture& p) {
  for (std::size_t i = 0; i + 1 < p.boxes.size(); ++i) {
    box& f = p.boxes[i];
    box& b = p.boxes[i + 1];
    if (f.op.fused == 0 || f.rank != b.rank || f.start != b.start || f.end != b.end || !is_compute(b.op.kind)) continue;
    f.of_pair = half::first;
    b.of_pair = half::second;
  }
}

/// A plan's picture with a simulated timeline, without actions that never ran because of a deadlock.
template <class = void>
picture picture_of(plan_view const& plan, timeline const& when, std::string title = "predicted") {
  picture out;
  out.title = std::move(title);
  out.schedule = plan.name;
  out.size = plan.size;
  out.stages = plan.stages;
  out.rows = plan.size.ranks;
  out.forward_only = plan.forward_only;
  std::vector<int> chunk;
  for (int s = 0; s < plan.stages; ++s) {
    chunk.push_back(plan.chunk_of(s));
    out.size.chunks = std::max(out.size.chunks, chunk.back() + 1);
  }
  // If the simulation stopped early, actions that never ran have an end of 0.
  out.boxes.reserve(static_cast<std::size_t>(plan.total()));
  for (int r = 0; r < plan.size.ranks; ++r) {
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      if (!when.complete && !(when.end.data[i] > 0)) continue;
      action const a = plan.actions[i];
      out.boxes.push_back({r, when.start.data[i], when.end.data[i], a, chunk[a.stage]});
    }
  }
  mark_pairs(out);
  return out;
}

/// A plan's picture under its costs, with its critical path and with gathers of parameters. Transfers that occupy ranks are
/// drawn: a send directly after its action, a receive directly before its action.
template <class = void>
picture picture_of(plan_view const& plan, cost_view const& costs, std::string title = "predicted") {
  timeline const when = simulate(plan, costs);
  picture out = picture_of(plan, when, std::move(title));
  if (!when.complete) return out;
  step_graph const graph(plan);
  for (path_step const& step : critical_path_of(plan, costs, when)) out.critical_path.push_back(step.action);
  buffer<double> const whole = chevron::detail::whole_from(plan, costs);
  std::vector<double> gathered(static_cast<std::size_t>(plan.size.ranks));
  std::vector<int> chunk(gathered.size());
  for (int s = 0; s < whole.count; ++s) {
    auto const r = static_cast<std::size_t>(plan.rank_of[s]);
    out.boxes.push_back(
        {plan.rank_of[s], std::exchange(gathered[r], whole[s]), whole[s], make_action(kind::unshard, s, 0), chunk[r]++});
  }
  for (int r = 0; r < plan.size.ranks; ++r) {
    for (int i = plan.begin[r]; i < plan.begin[r + 1];) {
      int const last = last_of_pair(plan.actions, i, plan.begin[r + 1]);
      double sent = when.end.data[i];
      auto const draw_message = [&](int h, kind what, double from, double to) {
        action const a = plan.actions[h];
        out.boxes.push_back({r, from, to, make_action(what, static_cast<int>(a.stage), static_cast<int>(a.micro_batch)),
                             out.boxes[static_cast<std::size_t>(h)].chunk});
      };
      for (int h = i; h <= last && costs.occupies_sender(); ++h) {
        action const a = plan.actions[h];
        int const boundary = graph.crosses(a);
        if (boundary < 0) continue;
        double const from = sent;
        sent += costs.of_message(boundary, static_cast<int>(a.micro_batch));
        draw_message(h, a.kind == kind::forward ? kind::send_forward : kind::send_backward, from, sent);
      }
      double received = when.start.data[i];
      for (int h = last; h >= i && costs.occupies_receiver(); --h) {
        action const a = plan.actions[h];
        int const boundary = graph.comes_over(a);
        if (boundary < 0) continue;
        double const to = received;
        received -= costs.of_message(boundary, static_cast<int>(a.micro_batch));
        draw_message(h, a.kind == kind::forward ? kind::receive_forward : kind::receive_backward, received, to);
      }
      i = last + 1;
    }
  }
  return out;
}

/// The picture of several steps back to back, without a barrier between them; every step counts its microbatches from 0.
template <class = void>
picture picture_of_steps(plan_view const& plan, cost_view const& costs, int steps, std::string title = "predicted") {
  chevron::plan const all = back_to_back(plan, steps);
  picture out = picture_of(all, costs, std::move(title));
  out.size.micro_batches = plan.size.micro_batches;  // microbatches of one step
  out.steps = steps;
  for (box& b : out.boxes) {
    int const micro_batch = static_cast<int>(b.op.micro_batch);
    b.step = micro_batch / plan.size.units();
    b.op.micro_batch = static_cast<std::uint32_t>(micro_batch % plan.size.units()) & 0xffffu;
  }
  return out;
}

/// First start of any compute box, or of a gather of parameters before it.
template <class = void>
double first_start(picture const& p) {
  bool any = false;
  double first = 0;
  for (box const& b : p.boxes) {
    if (!is_compute(b.op.kind) && b.op.kind != kind::unshard) continue;
    first = any ? std::min(first, b.start) : b.start;
    any = true;
  }
  return first;
}

/// A picture in another unit: multiplies its times by `factor`.
template <class = void>
picture scaled(picture p, double factor, std::string unit) {
  for (box& b : p.boxes) {
    b.start *= factor;
    b.end *= factor;
  }
  p.unit = std::move(unit);
  p.microseconds /= factor;
  return p;
}

/// The number that a box shows: `3`, or with slices `3.1`.
template <class = void>
std::string unit_words(action a, int slices) {
  text out;
  append_unit(out, static_cast<int>(a.micro_batch), slices);
  return out.str();
}

/// Explains the numbers of boxes, for legends.
inline char const* number_words(picture const& p) {
  return p.size.slices > 1 ? "; numbers: microbatch.slice" : "; numbers: microbatches";
}

/// A picture's sizes in words: `4 ranks × 2 chunks, 8 microbatches × 4 slices`.
template <class = void>
std::string size_words(picture const& p, char const* times = "\xc3\x97") {
  auto const some = [](int n, char const* one, char const* ending = "s") {
    return std::to_string(n) + " " + one + (n == 1 ? "" : ending);
  };
  std::string out = some(p.size.ranks, "rank");
  if (p.rows > p.size.ranks && p.size.ranks > 0) {
    out = some(p.rows / p.size.ranks, "replica") + " " + times + " " + out;
  }
  if (p.size.chunks > 1) out += std::string(" ") + times + " " + some(p.size.chunks, "chunk");
  out += ", " + some(p.size.micro_batches, "microbatch", "es");
  if (p.size.slices > 1) out += std::string(" ") + times + " " + some(p.size.slices, "slice");
  return p.steps > 1 ? out + ", " + some(p.steps, "step") : out;
}

/// Calls `entry(key, value)` for each size of a pipeline, for an object in JSON.
template <class Entry>
void size_entries(shape size, int stages, Entry const& entry) {
  entry("ranks", std::to_string(size.ranks));
  entry("chunks", std::to_string(size.chunks));
  entry("stages", std::to_string(stages));
  entry("micro_batches", std::to_string(size.micro_batches));
}

}  // namespace chevron::show
