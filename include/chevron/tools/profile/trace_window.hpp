#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/run/core/rank_trace.hpp>

/// \file
/// Computes the costs of actions and messages from ranks' records of steps.
///
///     chevron::trace_window records;
///     records.keep(train.last_trace(), train.step(…).seconds);                   // each step after some of warm-up
///     auto const texts = line.all_gather_text(records.text());                        // on every rank
///     auto const measured = chevron::profile_of(plan, chevron::steps_of(texts));  // on the rank that writes the file

namespace chevron {

/// The record of one step of one rank.
struct step_trace {
  long step = 0;
  double seconds = 0;
  int peak_in_flight = 0;
  allocator_use memory{};
  std::vector<trace_event> entries;
};

/// One rank's records of its last steps.
class trace_window {
 public:
  static constexpr std::size_t kept = 20;  ///< the most steps that are stored

  /// Appends a copy of a rank's last step, and drops the oldest of more than `kept` steps. \param seconds of the whole step
  void keep(rank_trace const& of, double seconds) {
    if (steps_.size() == kept) steps_.pop_front();
    steps_.push_back({of.step(), seconds, of.peak_in_flight(), of.memory(), {of.entries().begin(), of.entries().end()}});
  }
  std::size_t size() const { return steps_.size(); }  ///< the number of stored steps

  /// The records as text, for `transport::all_gather_text`.
  std::string text() const {
    std::ostringstream out;
    out.precision(12);
    for (step_trace const& s : steps_) {
      out << s.step << ' ' << s.seconds << ' ' << s.peak_in_flight << ' ' << s.memory.active << ' ' << s.memory.reserved << ' '
          << s.memory.planned << ' ' << s.memory.total << ' ' << s.entries.size() << '\n';
      for (trace_event const& r : s.entries) {
        out << static_cast<int>(r.op.kind) << ' ' << r.op.fused << ' ' << r.op.stage << ' ' << r.op.micro_batch << ' '
            << r.reached << ' ' << r.start << ' ' << r.end << '\n';
      }
    }
    return out.str();
  }

 private:
  std::deque<step_trace> steps_;
};

/// Steps of each rank; the index of a rank is replica × P + pipeline rank. All ranks must have recorded the same steps.
using all_steps = std::vector<std::vector<step_trace>>;

/// Reads steps from ranks' `trace_window::text`.
/// \param texts by global rank \param shards per stage; all run the same instructions, so only the first shard's text is read
inline all_steps steps_of(std::vector<std::string> const& texts, int shards = 1) {
  all_steps out;
  for (std::size_t rank = 0; rank < texts.size(); rank += static_cast<std::size_t>(shards)) {
    std::istringstream in(texts[rank]);
    out.emplace_back();
    std::size_t count = 0;
    for (step_trace one; in >> one.step >> one.seconds >> one.peak_in_flight >> one.memory.active >> one.memory.reserved >>
                         one.memory.planned >> one.memory.total >> count;) {
      one.entries.resize(count);
      for (trace_event& r : one.entries) {
        int what = 0, stage = 0, micro_batch = 0;
        unsigned fused = 0;
        in >> what >> fused >> stage >> micro_batch >> r.reached >> r.start >> r.end;
        r.op = make_action(static_cast<kind>(what), stage, micro_batch);
        r.op.fused = fused & 1u;
      }
      out.back().push_back(std::move(one));
      one = {};
    }
  }
  return out;
}

/// \returns the seconds from time `from` to time `to`, both in ns
inline double seconds_between(std::int64_t from, std::int64_t to) { return static_cast<double>(to - from) * 1e-9; }

/// Calls `look(first, second, start, end)` for each computation of a rank, in order. For a fused pair `look` is called once,
/// with both halves; for any other computation `second` is null.
template <class Look>
void each_computation(std::vector<trace_event> const& entries, Look&& look) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    trace_event const& r = entries[i];
    if (!is_compute(r.op.kind)) continue;
    if (r.op.fused == 0 || i + 1 == entries.size()) {
      look(r, static_cast<trace_event const*>(nullptr), r.start, r.end);
      continue;
    }
    trace_event const& other = entries[++i];
    look(r, &other, std::min(r.start, other.start), std::max(r.end, other.end));
  }
}

/// Returns the start of the first and the end of the last computation in the k-th stored step, in ns.
/// \param from index of the first rank \param ranks number of ranks: of one replica, or all
inline std::pair<std::int64_t, std::int64_t> pipeline_of(all_steps const& all, std::size_t k, std::size_t from,
                                                         std::size_t ranks) {
  std::pair<std::int64_t, std::int64_t> out{0, 0};
  bool any = false;
  for (std::size_t rank = from; rank < from + ranks; ++rank) {
    for (trace_event const& r : all[rank][k].entries) {
      if (!is_compute(r.op.kind)) continue;
      out.first = any ? std::min(out.first, r.start) : r.start;
      out.second = any ? std::max(out.second, r.end) : r.end;
      any = true;
    }
  }
  return out;
}

/// What the times of a profile are of, if sequences are in slices.
enum class profiled_times {
  units,         ///< of a slice: medians over all slices
  microbatches,  ///< of a whole microbatch: the sum, over its slices, of each slice's median
};

/// Computes a plan's costs from the records of one or several replicas: medians over steps, microbatches and replicas.
///
/// An action's time excludes waits for other ranks. If the halves of fused pairs ran at the same time, an action's time is the
/// median of its runs alone, and `hidden` is the share of a pair's shorter half that the longer half hides. A message's time is
/// from the end of its producer to the start of its consumer, including the executor's own work at both ends; only consumers
/// count that already waited when the producer ended, so that nothing but the message delayed them. Ranks' clocks are compared,
/// so ranks must be threads or processes of one machine, or have synchronized clocks: if any message seems to arrive before it
/// was produced, all messages' times are `not_measured`.
/// \param all ranks' steps, by `steps_of`
/// \param times costs of a plan with slices; a profile's file contains those of microbatches
/// \returns times in ms
inline profile profile_of(plan_view const& plan, all_steps const& all, profiled_times times = profiled_times::units) {
  profile out;
  out.schedule = plan.name;
  out.size = plan.size;
  out.stages = plan.stages;
  auto const ranks = static_cast<std::size_t>(plan.size.ranks);
  auto const stages = static_cast<std::size_t>(plan.stages);
  auto const micro_batches = static_cast<std::size_t>(plan.size.units());
  out.replicas = static_cast<int>(all.size() / ranks);
  out.steps = static_cast<int>(all.front().size());

  // A list of times for each part of a microbatch whose times are alike.
  auto const parts = static_cast<std::size_t>(times == profiled_times::microbatches ? plan.size.slices : 1);
  auto const part_of = [&](action a) { return a.micro_batch % parts; };
  auto const number_of = [&](action a) {
    return (part_of(a) * stages + a.stage) * compute_kinds + static_cast<std::size_t>(a.kind);
  };
  std::vector<std::vector<double>> alone(parts * stages * compute_kinds), beside(alone.size());
  struct pair_time {
    std::size_t first, second;
    double time;  // 0: the halves ran one after the other
  };
  std::vector<pair_time> pairs;
  // By part and boundary between stages: F's results; B's or I's.
  std::vector<std::array<std::vector<double>, 2>> delays(parts * stages);
  bool clocks_agree = true;
  std::vector<double> lengths, whole;
  std::vector<std::int64_t> made(2 * stages * micro_batches);  // end of each result's computation: F's results, then B's or I's
  auto const cell = [&](action a, std::size_t stage) {
    return (a.kind == kind::forward ? 0 : stages * micro_batches) + stage * micro_batches + a.micro_batch;
  };
  for (std::size_t k = 0; k < all.front().size(); ++k) {
    for (std::size_t g = 0; g < all.size(); g += ranks) {
      // Replicas begin a step independently, so each replica's pipeline is measured separately.
      auto const [first, last] = pipeline_of(all, k, g, ranks);
      lengths.push_back(1e3 * seconds_between(first, last));
      double longest = 0;
      for (std::size_t r = g; r < g + ranks; ++r) longest = std::max(longest, all[r][k].seconds);
      whole.push_back(1e3 * longest);
      for (std::size_t r = g; r < g + ranks; ++r) {
        each_computation(
            all[r][k].entries, [&](trace_event const& one, trace_event const* other, std::int64_t start, std::int64_t end) {
              bool const together = other != nullptr && std::max(one.start, other->start) < std::min(one.end, other->end);
              if (other != nullptr)
                pairs.push_back({number_of(one.op), number_of(other->op), together ? 1e3 * seconds_between(start, end) : 0});
              for (trace_event const* const half : {&one, other}) {
                if (half == nullptr) continue;
                (together ? beside : alone)[number_of(half->op)].push_back(1e3 * seconds_between(half->start, half->end));
                // Both results of a fused pair are sent at its end.
                if (row_of(half->op.kind).to != 0) made[cell(half->op, half->op.stage)] = end;
              }
            });
      }
      for (std::size_t r = g; r < g + ranks; ++r) {
        for (trace_event const& one : all[r][k].entries) {
          int const boundary = is_compute(one.op.kind) ? step_graph(plan).comes_over(one.op) : step_graph::none;
          if (boundary < 0) continue;
          bool const forward = one.op.kind == kind::forward;
          std::int64_t const there = made[cell(one.op, forward ? one.op.stage - 1 : one.op.stage + 1)];
          clocks_agree = clocks_agree && there <= one.start;
          if (one.reached <= there)
            delays[part_of(one.op) * stages + static_cast<std::size_t>(boundary)][forward ? 0 : 1].push_back(
                1e3 * seconds_between(there, one.start));
        }
      }
    }
  }

  auto const sum_over_parts = [&](auto const& time_of_part) {
    double sum = 0;
    for (std::size_t part = 0; part < parts; ++part) {
      double const time = time_of_part(part);
      if (time < 0) return profile::not_measured;
      sum += time;
    }
    return sum;
  };
  for (std::size_t s = 0; s < stages; ++s) {
    auto const cost = [&](kind k) {
      return sum_over_parts([&](std::size_t part) {
        std::size_t const i = (part * stages + s) * compute_kinds + static_cast<std::size_t>(k);
        auto const& runs = alone[i].empty() ? beside[i] : alone[i];
        return runs.empty() ? profile::not_measured : median(runs);
      });
    };
    out.forward.push_back(cost(kind::forward));
    out.backward.push_back(cost(kind::backward));
    out.backward_input.push_back(cost(kind::backward_input));
    out.backward_weight.push_back(cost(kind::backward_weight));
    out.recompute.push_back(cost(kind::recompute));
    if (s + 1 == stages) break;
    out.communication.push_back(sum_over_parts([&](std::size_t part) {
      double sum = 0;
      int directions = 0;
      for (auto const& runs : delays[part * stages + s]) {
        if (runs.empty()) continue;
        sum += median(runs);
        ++directions;
      }
      return clocks_agree && directions > 0 ? sum / directions : profile::not_measured;
    }));
  }
  if (std::all_of(out.recompute.begin(), out.recompute.end(), [](double time) { return time < 0; })) out.recompute.clear();
  std::vector<double> hidden;
  for (pair_time const& pair : pairs) {
    if (alone[pair.first].empty() || alone[pair.second].empty()) continue;
    double const f = median(alone[pair.first]), b = median(alone[pair.second]);
    bool const gains = pair.time > 0 && std::min(f, b) > 0;
    hidden.push_back(gains ? std::clamp((f + b - pair.time) / std::min(f, b), 0.0, 1.0) : 0);
  }
  if (!hidden.empty()) out.hidden = median(hidden);
  out.pipeline = median(lengths);
  out.step = median(whole);
  return out;
}

}  // namespace chevron
