#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Evaluation with a training schedule's placement.

namespace chevron {

/// A plan's forwards, in their order: what evaluation runs; of all its microbatches or of the first so many. Lawful if the plan was.
constexpr plan forward_part(plan const& of, int micro_batches = max_micro_batches) {
  int const ranks = of.size.ranks;
  plan only = of;
  only.forward_only = true;
  only.in_flight_limit = 0;
  only.message_limit = only.byte_limit = 0;
  if (micro_batches < of.size.micro_batches) only.size.micro_batches = micro_batches;
  int kept = 0;
  for (int r = 0; r < ranks; ++r) {
    int const first = of.begin.data[r], last = of.begin.data[r + 1];
    only.begin.data[r] = kept;
    for (int i = first; i < last; ++i) {
      if (of.actions.data[i].what != kind::forward || static_cast<int>(of.actions.data[i].micro_batch) >= micro_batches) continue;
      only.actions.data[kept] = of.actions.data[i];
      only.actions.data[kept++].fused = 0;  // its other half is left out
    }
  }
  only.begin.data[ranks] = kept;
  return only;
}

}  // namespace chevron
