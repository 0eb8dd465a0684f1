#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// How many chunks are in flight on a rank: from a chunk's F until its B, or its W when the backward is split.

namespace chevron {

/// By how much an action changes the number of chunks in flight once it has run.
constexpr int in_flight_change(kind what, bool forward_only) {
  if (what == kind::forward) return forward_only ? 0 : 1;
  return what == kind::backward || what == kind::backward_weight ? -1 : 0;
}

/// The most chunks in flight on a rank at any time; each holds one stage's activations for one microbatch.
constexpr int peak_in_flight(plan_view const& plan, int rank) {
  int now = 0;
  int most = 0;
  int const stop = plan.begin[rank + 1];
  action const* const actions = plan.actions;
  for (int i = plan.begin[rank]; i < stop; ++i) {
    now += in_flight_change(actions[i].what, plan.forward_only);
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

/// Messages a step sends: one for each activation and each gradient that crosses from one rank to another.
constexpr int messages(plan_view const& plan) {
  int crossings = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) crossings += plan.rank_of[s] != plan.rank_of[s + 1] ? 1 : 0;
  return crossings * plan.size.micro_batches * (plan.forward_only ? 1 : 2);
}

}  // namespace chevron
