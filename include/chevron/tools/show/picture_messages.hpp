#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <chevron/prove/memory.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// The messages of a picture, and its chunks in flight over time, computed from its boxes.

namespace chevron::show {

/// One message: the boxes of its send and its arrival, as indices into `picture::boxes`.
struct message {
  int from = -1;
  int to = -1;
};

/// Finds every message of a picture. A message's ends are its SEND and RECV boxes, if these were recorded, otherwise the
/// computations that produce and consume it.
template <class = void>
std::vector<message> messages_of(picture const& p) {
  // The key of every box as one number: step and replica, kind, stage, microbatch. Of boxes with the same key the first counts.
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
    return run << 31 | static_cast<std::uint64_t>(what) << 27 | static_cast<std::uint64_t>(stage) << 16 | like.op.micro_batch;
  };
  for (std::size_t i = 0; i < p.boxes.size(); ++i) {
    box const& b = p.boxes[i];
    where.push_back({number_of(b, b.op.kind, static_cast<int>(b.op.stage)), static_cast<int>(i)});
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
    int const stage = static_cast<int>(from.op.stage);
    bool const forward = makes_output(from.op.kind), backward = makes_input_gradient(from.op.kind);
    if (!forward && !backward) continue;
    int const next = stage + row_of(from.op.kind).to;
    int to = find(from, from.op.kind, next);
    if (to < 0 && backward) to = find(from, gradient_kind(ends_cell(from.op.kind)), next);
    if (to < 0 || p.boxes[static_cast<std::size_t>(to)].rank == from.rank) continue;
    message m{static_cast<int>(i), to};
    int const sent = find(from, forward ? kind::send_forward : kind::send_backward, stage);
    int const received = find(from, forward ? kind::receive_forward : kind::receive_backward, next);
    if (sent >= 0 && received >= 0) m = {sent, received};
    out.push_back(m);
  }
  return out;
}

/// The number of chunks in flight on row `rank` from `time` on. Lists of points are in the order of time.
struct in_flight_point {
  double time = 0;
  int rank = 0;
  int chunks = 0;
};

template <class = void>
std::vector<in_flight_point> in_flight_over_time(picture const& p) {
  // If one action ends when the next one starts, the order of a row's boxes decides. (Not std::stable_sort, of which clang 19
  // warns in the headers of GCC 12.)
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t i = 0; i < p.boxes.size(); ++i) {
    box const& b = p.boxes[i];
    int const change = is_compute(b.op.kind) ? in_flight_change(b.op.kind, p.forward_only) : 0;
    if (change != 0) order.emplace_back(change > 0 ? b.start : b.end, i);
  }
  std::sort(order.begin(), order.end());
  std::vector<in_flight_point> out;
  for (auto const& [time, i] : order)
    out.push_back({time, p.boxes[i].rank, in_flight_change(p.boxes[i].op.kind, p.forward_only)});
  std::vector<int> now(static_cast<std::size_t>(std::max(p.rows, 0)));
  for (in_flight_point& c : out) c.chunks = now[static_cast<std::size_t>(c.rank)] += c.chunks;
  return out;
}

}  // namespace chevron::show
