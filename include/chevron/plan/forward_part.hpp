#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Plans for evaluation, made from the plans of training.

namespace chevron {

/// A plan's forwards, in their order, for evaluation: of all its microbatches, or of the first `micro_batches`, with all their
/// slices. If the plan is lawful, so is the result. Takes a plan or a `checked<…>`; for programs (`lower`, `lowered<…>`) see
/// lower/program.hpp.
constexpr plan forward_part(plan_view const& of, int micro_batches = max_micro_batches) {
  plan only;
  only.size = of.size;
  only.name = of.name;
  only.problem = of.problem;
  if (of.problem) return only;
  only.stages = of.stages;
  only.forward_only = true;
  if (micro_batches < of.size.micro_batches) only.size.micro_batches = micro_batches;
  int const ranks = of.size.ranks, total = of.total();
  auto const wanted = [&](action what) {
    return what.kind == kind::forward && static_cast<int>(what.micro_batch) / of.size.slices < micro_batches;
  };
  int forwards = 0;
  for (int i = 0; i < total; ++i) forwards += wanted(of.actions[i]) ? 1 : 0;
  only.actions = buffer<action>(forwards);
  only.begin = buffer<int>(ranks + 1);
  only.rank_of = buffer<std::int16_t>(of.stages);
  for (int s = 0; s < of.stages; ++s) only.rank_of.data[s] = of.rank_of[s];
  int kept = 0;
  for (int r = 0; r < ranks; ++r) {
    only.begin.data[r] = kept;
    for (int i = of.begin[r]; i < of.begin[r + 1]; ++i) {
      if (!wanted(of.actions[i])) continue;
      only.actions.data[kept] = of.actions[i];
      only.actions.data[kept++].fused = 0;  // the other half of the fused pair is left out
    }
  }
  only.begin.data[ranks] = kept;
  return only;
}

}  // namespace chevron
