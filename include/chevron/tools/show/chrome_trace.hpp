#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/picture_messages.hpp>

/// \file
/// Pictures as a trace in Chrome's JSON format, which Perfetto, chrome://tracing and PyTorch's tools read.

namespace chevron::show {

namespace detail {

/// Streams of a rank in the order of its tracks.
inline constexpr int stream_count = 5;
inline constexpr char const* stream_names[stream_count] = {"compute", "send", "receive", "over replicas", "optimizer"};
inline int stream_of(kind what) {
  if (is_send(what) || is_wait(what)) return 1;
  if (is_receive(what)) return 2;
  return is_of_stage(what) ? 3 : what == kind::optimizer_step ? 4 : 0;
}

/// Chooses a track for each box. A trace's slices (its boxes) must not overlap in part on one track, so boxes that overlap on
/// one stream (two sends at the same time) get further tracks: `lane` 0, 1, 2 … of the stream.
inline std::vector<int> lanes_of(picture const& p) {
  std::vector<int> order(p.boxes.size());
  std::iota(order.begin(), order.end(), 0);
  auto const start = [&](int i) { return p.boxes[static_cast<std::size_t>(i)].start; };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return std::pair(start(a), a) < std::pair(start(b), b); });
  std::vector<std::vector<double>> busy_until(static_cast<std::size_t>(std::max(p.rows, 0) * stream_count));
  std::vector<int> lane(p.boxes.size());
  for (int i : order) {
    box const& b = p.boxes[static_cast<std::size_t>(i)];
    if (b.of_pair == half::second) {
      lane[static_cast<std::size_t>(i)] = lane[static_cast<std::size_t>(i - 1)];
      continue;
    }
    auto& lanes = busy_until[static_cast<std::size_t>(b.rank * stream_count + stream_of(b.op.kind))];
    std::size_t free = 0;
    while (free < lanes.size() && lanes[free] > b.start) ++free;
    if (free == lanes.size()) lanes.push_back(0);
    lanes[free] = b.end;
    lane[static_cast<std::size_t>(i)] = static_cast<int>(free);
  }
  return lane;
}

}  // namespace detail

/// One or more pictures as one trace: each rank is a process (the second picture's ranks after the first's), each stream a
/// track. Each box is a slice of the trace, with the name that PyTorch's profiler gives to its range: `PP:3F0`, and for a fused
/// pair, which is one slice, `PP:(0F7;7B3)OVERLAP_F_B`. Category and process of a slice name its picture. A message is a flow
/// from its send to its arrival; chunks in flight are a counter. Timestamps are in microseconds, `picture::microseconds` for
/// each unit of time.
inline std::string chrome_trace(std::span<picture const> pictures) {
  std::string out = "{\"displayTimeUnit\": \"ms\",\n\"otherData\": {";
  if (!pictures.empty()) {
    picture const& p = pictures.front();
    out += "\"schedule\": " + json_string(p.schedule) + ", \"ranks\": " + std::to_string(p.size.ranks) +
           ", \"chunks\": " + std::to_string(p.size.chunks) + ", \"micro_batches\": " + std::to_string(p.size.micro_batches) +
           ", \"slices\": " + std::to_string(p.size.slices) + ", \"time\": " +
           json_string(p.unit.empty() ? "a cost of 1 is drawn as " + number(p.microseconds) + " us" : "microseconds");
  }
  out += "},\n\"traceEvents\": [\n";
  bool any = false;
  auto const event = [&](std::string const& fields) {
    out += std::string(any ? ",\n" : "") + "{" + fields + "}";
    any = true;
  };
  int first_process = 0;
  int flow = 0;
  for (picture const& p : pictures) {
    double const us = p.microseconds;
    std::string const category = json_string(p.title.empty() ? "schedule" : p.title);
    std::vector<int> const lane = detail::lanes_of(p);
    auto const process = [&](int rank) { return std::to_string(first_process + rank); };
    auto const track = [&](std::size_t i) {
      return std::to_string(detail::stream_of(p.boxes[i].op.kind) + detail::stream_count * lane[i]);
    };
    std::vector<std::pair<int, int>> tracks;  // row, and stream + lane * stream_count
    for (std::size_t i = 0; i < p.boxes.size(); ++i) {
      tracks.push_back({p.boxes[i].rank, detail::stream_of(p.boxes[i].op.kind) + detail::stream_count * lane[i]});
    }
    std::sort(tracks.begin(), tracks.end());
    tracks.erase(std::unique(tracks.begin(), tracks.end()), tracks.end());
    auto const name_it = [&](char const* what, int rank, std::string const& tid, std::string const& args) {
      event("\"name\": \"" + std::string(what) + "\", \"ph\": \"M\", \"pid\": " + process(rank) + ", \"tid\": " + tid +
            ", \"args\": {" + args + "}");
    };
    for (int r = 0; r < p.rows; ++r) {
      std::string name = "rank " + std::to_string(r * p.ranks_apart);
      if (!p.title.empty()) name += ", " + p.title;
      name_it("process_name", r, "0", "\"name\": " + json_string(name));
      name_it("process_sort_index", r, "0", "\"sort_index\": " + process(r));
    }
    for (auto const& [rank, which] : tracks) {
      int const l = which / detail::stream_count;
      std::string const name = detail::stream_names[which % detail::stream_count] + (l == 0 ? "" : " " + std::to_string(l + 1));
      name_it("thread_name", rank, std::to_string(which), "\"name\": " + json_string(name));
      // Sorts tracks by stream, then by lane.
      name_it("thread_sort_index", rank, std::to_string(which),
              "\"sort_index\": " + std::to_string(which % detail::stream_count * 1000 + l));
    }
    for (std::size_t i = 0; i < p.boxes.size(); ++i) {
      box const& b = p.boxes[i];
      if (b.of_pair == half::second) continue;  // the slice of the first half covers both halves
      std::string args;
      if (b.op.kind != kind::optimizer_step) args = "\"stage\": " + std::to_string(b.op.stage) + ", ";
      if (b.op.kind != kind::optimizer_step && !is_of_stage(b.op.kind)) {
        auto const unit = static_cast<int>(b.op.micro_batch);
        args += "\"micro_batch\": " + std::to_string(unit / p.size.slices) + ", ";
        if (p.size.slices > 1) args += "\"slice\": " + std::to_string(unit % p.size.slices) + ", ";
        args += "\"chunk\": " + std::to_string(b.chunk) + ", ";
      }
      std::string name = to_text(b.op, p.size.slices).str();
      if (b.of_pair == half::first) {
        box const& other = p.boxes[i + 1];
        name = to_text(fused_pair{b.op, other.op}, p.size.slices).str();
        args += "\"backward_stage\": " + std::to_string(other.op.stage) +
                ", \"backward_micro_batch\": " + std::to_string(static_cast<int>(other.op.micro_batch) / p.size.slices) +
                ", \"backward_chunk\": " + std::to_string(other.chunk) + ", ";
      }
      event("\"name\": " + json_string("PP:" + name) + ", \"cat\": " + category + ", \"ph\": \"X\", \"ts\": " +
            exact(b.start * us) + ", \"dur\": " + exact((b.end - b.start) * us) + ", \"pid\": " + process(b.rank) +
            ", \"tid\": " + track(i) + ", \"args\": {" + args + "\"step\": " + std::to_string(b.step) + "}");
    }
    for (message const& m : messages_of(p)) {
      box const& from = p.boxes[static_cast<std::size_t>(m.from)];
      box const& to = p.boxes[static_cast<std::size_t>(m.to)];
      // A flow binds to the slice around its time, so both its ends get a moment inside their slices, and the end is never before
      // the beginning: a message may arrive before its sender's slice ends.
      double const leaves = std::max(from.start, std::min(from.start + (from.end - from.start) / 2, to.end));
      double const earliest = std::max(to.start, std::min(leaves, to.end));
      double const arrives = earliest + (to.end - earliest) / 2;
      ++flow;
      auto const end_of = [&](char const* phase, int index, double when) {
        event("\"name\": \"message\", \"cat\": " + category + ", \"ph\": \"" + phase + "\", \"id\": " + std::to_string(flow) +
              ", \"ts\": " + exact(when * us) + ", \"pid\": " + process(p.boxes[static_cast<std::size_t>(index)].rank) +
              ", \"tid\": " + track(static_cast<std::size_t>(index)) + (*phase == 'f' ? ", \"bp\": \"e\"" : ""));
      };
      end_of("s", m.from, leaves);
      end_of("f", m.to, std::max(arrives, leaves));
    }
    for (in_flight_point const& c : in_flight_over_time(p)) {
      event("\"name\": \"in flight\", \"ph\": \"C\", \"ts\": " + exact(c.time * us) + ", \"pid\": " + process(c.rank) +
            ", \"args\": {\"chunks\": " + std::to_string(c.chunks) + "}");
    }
    first_process += p.rows;
  }
  return out + "\n]}\n";
}

/// The trace of one picture.
inline std::string chrome_trace(picture const& one) { return chrome_trace(std::span<picture const>(&one, 1)); }

/// The trace of a plan under these costs.
inline std::string chrome_trace(plan_view const& plan, cost_view const& costs) { return chrome_trace(picture_of(plan, costs)); }

}  // namespace chevron::show
