#pragma once

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/sizes.hpp>

/// \file
/// How many chunks are in flight on a rank, from a chunk's F until its B, or its W when the backward is split; how many messages
/// a step sends; and both in bytes where stages declare sizes.

namespace chevron {

/// The most chunks in flight on a rank at any time; each holds one stage's activations for one microbatch.
constexpr int peak_in_flight(plan_view const& plan, int rank) {
  int now = 0;
  int most = 0;
  int const stop = plan.begin[rank + 1];
  action const* const actions = plan.actions;
  for (int i = plan.begin[rank]; i < stop; ++i) {
    now += in_flight_change(actions[i].kind, plan.forward_only);
    most = now > most ? now : most;
  }
  return most;
}

/// The most over all ranks.
constexpr int peak_in_flight(plan_view const& plan) {
  int most = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const one = peak_in_flight(plan, r);
    most = one > most ? one : most;
  }
  return most;
}

/// The chunks of a rank that an R runs forward again: from F to R such a chunk holds its inputs alone.
class recomputed_chunks {
 public:
  constexpr recomputed_chunks(plan_view const& plan, int rank) : micro_batches_(plan.size.micro_batches) {
    for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) {
      if (plan.actions[i].kind != kind::recompute) continue;
      if (is_.count == 0) is_ = buffer<bool>(plan.stages * micro_batches_, zeroed);
      is_.data[cell_of(plan.actions[i])] = true;
    }
  }
  constexpr bool hold(action a) const { return is_.count > 0 && is_.data[cell_of(a)]; }

 private:
  constexpr int cell_of(action a) const { return static_cast<int>(a.stage) * micro_batches_ + static_cast<int>(a.micro_batch); }

  int micro_batches_;
  buffer<bool> is_;  // by (stage, microbatch); empty: none
};

/// By how many bytes an action changes the activations that its rank holds.
constexpr std::int64_t bytes_change(plan_view const& plan, size_view const& sizes, recomputed_chunks const& again, action a) {
  int const stage = static_cast<int>(a.stage);
  if (a.kind == kind::recompute) return sizes.activation_of(stage) - sizes.input_of(stage);
  if (a.kind == kind::forward && again.hold(a)) return sizes.input_of(stage);
  return in_flight_change(a.kind, plan.forward_only) * sizes.activation_of(stage);
}

/// The most bytes of activations that a rank holds at any time.
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes, int rank) {
  recomputed_chunks const again(plan, rank);
  std::int64_t now = 0;
  std::int64_t most = 0;
  int const stop = plan.begin[rank + 1];
  for (int i = plan.begin[rank]; i < stop; ++i) {
    now += bytes_change(plan, sizes, again, plan.actions[i]);
    most = now > most ? now : most;
  }
  return most;
}

/// The most over all ranks.
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes) {
  std::int64_t most = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    std::int64_t const one = peak_bytes(plan, sizes, r);
    most = one > most ? one : most;
  }
  return most;
}

/// Messages a step sends: one for each activation and each gradient that crosses from one rank to another.
constexpr int messages(plan_view const& plan) {
  int crossings = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) crossings += plan.rank_of[s] != plan.rank_of[s + 1] ? 1 : 0;
  return crossings * plan.size.micro_batches * (plan.forward_only ? 1 : 2);
}

/// Bytes of all messages of a step.
constexpr std::int64_t message_bytes(plan_view const& plan, size_view const& sizes) {
  std::int64_t sum = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) sum += plan.rank_of[s] != plan.rank_of[s + 1] ? sizes.message_of(s) : 0;
  return sum * plan.size.micro_batches * (plan.forward_only ? 1 : 2);
}

}  // namespace chevron
