#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/prove/critical_path.hpp>
#include <chevron/prove/idle.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// What there is to draw: boxes in time, one row a rank. A plan's simulation and a measured trace both become a `picture`, so
/// that every drawing treats "predicted" and "measured" alike.
// The larger functions are templates, so that only who draws compiles them: <chevron/schedule.hpp> brings them to everybody.

namespace chevron::show {

/// Which part of a fused pair a box is. The two halves of a pair are neighbours among the boxes, with the same start and end.
enum class half : unsigned char { none, first, second };

/// One action in time.
struct box {
  int rank = 0;      ///< row: pipeline rank, or global rank (replica × P + pipeline rank) where there are replicas
  double start = 0;  ///< in the picture's unit
  double end = 0;
  action what{};  ///< any kind: compute, messages, gradient sums, optimizer
  int chunk = 0;  ///< which of its rank's stages, from the input side
  int step = 0;   ///< training step, where a picture holds several
  half of_pair = half::none;
};

/// Boxes and what is needed to label them.
struct picture {
  std::string title;     ///< `predicted`, `measured` …; shown where several pictures share an axis
  std::string schedule;  ///< as the catalogue spells it
  shape size{};          ///< pipeline ranks, microbatches, chunks
  int stages = 0;
  int rows = 0;                ///< pipeline ranks × replicas
  bool forward_only = false;   ///< evaluation: nothing stays in flight
  std::string unit;            ///< of time: `s`, `ms` …; empty: the costs' own unit
  double microseconds = 1000;  ///< one unit of time in a trace; without a unit of its own, a cost of 1 is drawn as 1 ms
  std::vector<box> boxes;
  int steps = 1;                   ///< training steps drawn
  std::vector<int> critical_path;  ///< indices of boxes, in the order of time; empty where it is not known
};

/// The numbers that go with a picture. Times are in the picture's unit.
struct figures {
  double makespan = 0;              ///< first start to last end over all rows
  double span = 0;                  ///< longest single row's first start to last end
  double bubble_makespan = 0;       ///< share of rows × makespan without compute
  double bubble_span = 0;           ///< share of rows × span without compute
  std::vector<int> peak_in_flight;  ///< per row: most chunks between the start of F and the end of B or W
  std::vector<double> busy;         ///< per row: time computing
  int messages = 0;                 ///< activations and gradients that cross between ranks
  // Of plans only:
  double steady = 0;                     ///< each of many steps back to back; 0: not known
  double bubble_steady = 0;              ///< share of rows × steady without compute
  std::vector<idle_time> idle;           ///< per row: when it does not compute
  std::vector<std::int64_t> peak_bytes;  ///< per row: most bytes of activations; empty where stages declare no sizes
  std::int64_t message_bytes = -1;       ///< of all messages; -1 where stages declare no sizes
};

/// Makes pairs of neighbouring boxes that are an F marked as fused and, at the same time on the same row, its other half.
template <class = void>
void mark_pairs(picture& p) {
  for (std::size_t i = 0; i + 1 < p.boxes.size(); ++i) {
    box& f = p.boxes[i];
    box& b = p.boxes[i + 1];
    if (f.what.fused == 0 || f.rank != b.rank || f.start != b.start || f.end != b.end || !is_compute(b.what.what)) continue;
    f.of_pair = half::first;
    b.of_pair = half::second;
  }
}

/// A plan's picture under a simulated timeline. Actions that never ran (a deadlock) are left out.
template <class = void>
picture picture_of(plan_view const& plan, timeline const& when, std::string title = "predicted") {
  picture out;
  out.title = std::move(title);
  out.schedule = plan.name;
  out.size = plan.size;
  out.stages = plan.stages;
  out.rows = plan.size.ranks;
  out.forward_only = plan.forward_only;
  std::vector<int> chunk(static_cast<std::size_t>(plan.stages));
  std::vector<int> seen(static_cast<std::size_t>(plan.size.ranks));
  for (int s = 0; s < plan.stages; ++s) {
    chunk[static_cast<std::size_t>(s)] = seen[static_cast<std::size_t>(plan.rank_of[s])]++;
  }
  for (int n : seen) out.size.chunks = std::max(out.size.chunks, n);
  // Where the simulation stopped early, an action that never ran has an end of 0.
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

/// A plan's picture under its costs, with its critical path and, where they occupy a rank, with its transfers: a send right after
/// its action, a receive right before it.
template <class = void>
picture picture_of(plan_view const& plan, cost_view const& costs, std::string title = "predicted") {
  timeline const when = simulate(plan, costs);
  picture out = picture_of(plan, when, std::move(title));
  if (!when.complete) return out;
  for (path_step const& step : critical_path_of(plan, costs, when)) out.critical_path.push_back(step.action);
  for (int r = 0; r < plan.size.ranks; ++r) {
    for (int i = plan.begin[r]; i < plan.begin[r + 1];) {
      int const last = last_of_pair(plan.actions, i, plan.begin[r + 1]);
      double sent = when.end.data[i];
      for (int h = i; h <= last; ++h) {
        action const a = plan.actions[h];
        int const boundary = boundary_sent(plan, a);
        if (!costs.occupies_sender() || boundary < 0) continue;
        kind const what = a.what == kind::forward ? kind::send_forward : kind::send_backward;
        double const from = sent;
        sent += costs.of_message(boundary);
        out.boxes.push_back({r, from, sent, make_action(what, static_cast<int>(a.stage), static_cast<int>(a.micro_batch)),
                             out.boxes[static_cast<std::size_t>(h)].chunk});
      }
      double received = when.start.data[i];
      for (int h = last; h >= i; --h) {
        action const a = plan.actions[h];
        int const boundary = boundary_received(plan, a);
        if (!costs.occupies_receiver() || boundary < 0) continue;
        kind const what = a.what == kind::forward ? kind::receive_forward : kind::receive_backward;
        double const to = received;
        received -= costs.of_message(boundary);
        out.boxes.push_back({r, received, to, make_action(what, static_cast<int>(a.stage), static_cast<int>(a.micro_batch)),
                             out.boxes[static_cast<std::size_t>(h)].chunk});
      }
      i = last + 1;
    }
  }
  return out;
}

/// Several steps back to back, without a barrier between them; every step counts its microbatches from 0.
template <class = void>
picture picture_of_steps(plan_view const& plan, cost_view const& costs, int steps, std::string title = "predicted") {
  chevron::plan const all = back_to_back(plan, steps);
  picture out = picture_of(all, costs, std::move(title));
  out.size.micro_batches = plan.size.micro_batches;
  out.steps = steps;
  for (box& b : out.boxes) {
    int const micro_batch = static_cast<int>(b.what.micro_batch);
    b.step = micro_batch / plan.size.micro_batches;
    b.what.micro_batch = static_cast<std::uint32_t>(micro_batch % plan.size.micro_batches) & 0xffffu;
  }
  return out;
}

/// First start of any compute box.
template <class = void>
double first_start(picture const& p) {
  bool any = false;
  double first = 0;
  for (box const& b : p.boxes) {
    if (!is_compute(b.what.what)) continue;
    first = any ? std::min(first, b.start) : b.start;
    any = true;
  }
  return first;
}

/// The boxes of one training step, with time counted from that step's first compute.
template <class = void>
picture only_step(picture const& all, int step) {
  picture out = all;
  out.boxes.clear();
  out.critical_path.clear();
  for (box const& b : all.boxes) {
    if (b.step == step) out.boxes.push_back(b);
  }
  double const zero = first_start(out);
  for (box& b : out.boxes) {
    b.start -= zero;
    b.end -= zero;
  }
  return out;
}

/// The same picture in another unit: times are multiplied by `factor`.
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

/// One message: the boxes where it leaves and where it arrives, as indices into `picture::boxes`.
struct message {
  int from = -1;
  int to = -1;
};

/// Every message of a picture. Where SEND and RECV boxes were recorded they are the ends, else the computations that
/// produce and consume it.
template <class = void>
std::vector<message> messages_of(picture const& p) {
  // Every box by what it is, in one number: step and replica, kind, stage, microbatch. Of equal ones the first counts.
  struct entry {
    std::uint64_t what;
    int box;
  };
  std::vector<entry> where;
  where.reserve(p.boxes.size());
  int const ranks = std::max(1, p.size.ranks);
  int replicas = 1;
  for (box const& b : p.boxes) replicas = std::max(replicas, b.rank / ranks + 1);
  auto const number_of = [&](box const& like, kind what, int stage) {
    std::uint64_t const run = static_cast<std::uint64_t>(like.step) * static_cast<std::uint64_t>(replicas) +
                              static_cast<std::uint64_t>(like.rank / ranks);
    return run << 31 | static_cast<std::uint64_t>(what) << 27 | static_cast<std::uint64_t>(stage) << 16 | like.what.micro_batch;
  };
  for (std::size_t i = 0; i < p.boxes.size(); ++i) {
    box const& b = p.boxes[i];
    where.push_back({number_of(b, b.what.what, static_cast<int>(b.what.stage)), static_cast<int>(i)});
  }
  std::sort(where.begin(), where.end(),
            [](entry const& a, entry const& b) { return a.what != b.what ? a.what < b.what : a.box < b.box; });
  auto const find = [&](box const& like, kind what, int stage) {
    if (stage < 0 || stage >= max_stages) return -1;
    std::uint64_t const wanted = number_of(like, what, stage);
    auto const at =
        std::lower_bound(where.begin(), where.end(), wanted, [](entry const& e, std::uint64_t w) { return e.what < w; });
    return at == where.end() || at->what != wanted ? -1 : at->box;
  };
  std::vector<message> out;
  for (std::size_t i = 0; i < p.boxes.size(); ++i) {
    box const& from = p.boxes[i];
    int const stage = static_cast<int>(from.what.stage);
    bool const forward = from.what.what == kind::forward;
    bool const backward = from.what.what == kind::backward || from.what.what == kind::backward_input;
    if (!forward && !backward) continue;
    int const next = forward ? stage + 1 : stage - 1;
    int to = find(from, from.what.what, next);
    if (to < 0 && backward) to = find(from, from.what.what == kind::backward ? kind::backward_input : kind::backward, next);
    if (to < 0 || p.boxes[static_cast<std::size_t>(to)].rank == from.rank) continue;
    message m{static_cast<int>(i), to};
    int const sent = find(from, forward ? kind::send_forward : kind::send_backward, stage);
    int const received = find(from, forward ? kind::receive_forward : kind::receive_backward, next);
    if (sent >= 0 && received >= 0) m = {sent, received};
    out.push_back(m);
  }
  return out;
}

/// Chunks in flight on each row over time: (time, row, chunks), in order of time.
struct in_flight_point {
  double time = 0;
  int rank = 0;
  int chunks = 0;
};

template <class = void>
std::vector<in_flight_point> in_flight_over_time(picture const& p) {
  std::vector<in_flight_point> out;
  for (box const& b : p.boxes) {
    int const change = is_compute(b.what.what) ? in_flight_change(b.what.what, p.forward_only) : 0;
    if (change != 0) out.push_back({change > 0 ? b.start : b.end, b.rank, change});
  }
  // Stable: where one action ends at the moment the next one starts, the order of a row's boxes decides.
  std::stable_sort(out.begin(), out.end(), [](in_flight_point const& a, in_flight_point const& b) { return a.time < b.time; });
  std::vector<int> now(static_cast<std::size_t>(std::max(p.rows, 0)));
  for (in_flight_point& c : out) c.chunks = now[static_cast<std::size_t>(c.rank)] += c.chunks;
  return out;
}

/// The numbers of any picture, from its boxes.
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
    if (!is_compute(b.what.what)) continue;
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

/// The numbers of a plan, from the analyses themselves; in bytes as well as far as `sizes` declares any.
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
  for (int r = 0; r < plan.size.ranks; ++r) {
    out.idle.push_back(idle.data[r]);
    out.peak_in_flight.push_back(peak_in_flight(plan, r));
    if (sizes.activation != nullptr) out.peak_bytes.push_back(peak_bytes(plan, sizes, r));
    out.busy.push_back(busy(plan, costs, r));
  }
  out.messages = messages(plan);
  if (sizes.message != nullptr) out.message_bytes = message_bytes(plan, sizes);
  return out;
}

/// `4 ranks × 2 chunks, 8 microbatches`.
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
  return p.steps > 1 ? out + ", " + some(p.steps, "step") : out;
}

}  // namespace chevron::show
