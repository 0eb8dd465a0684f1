#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Makes plans for evaluation from plans for training.

namespace chevron {

/// Returns a plan of only the forwards of `of`, in their order, for evaluation: the forwards of all microbatches, or of the
/// first `micro_batches` with all their slices. The result of a lawful plan is lawful. `of` is a plan or a `checked<…>`; for
/// programs (`lower`, `lowered<…>`) see lower/program.hpp.
constexpr plan forward_part(plan_view const& of, int micro_batches = max_micro_batches) {
  plan_view facts = of;
  static_cast<plan_facts&>(facts) = {
      .size = of.size, .stages = of.problem ? 0 : of.stages, .forward_only = !of.problem, .problem = of.problem};
  if (of.problem) return detail::without_lists(facts);
  if (micro_batches < of.size.micro_batches) facts.size.micro_batches = micro_batches;
  return detail::with_lists(facts, of.total(), [&](int rank, auto const& put) {
    for (int i = of.begin[rank]; i < of.begin[rank + 1]; ++i) {
      action a = of.actions[i];
      a.fused = 0;  // the other half of the fused pair is left out
      if (a.kind == kind::forward && static_cast<int>(a.micro_batch) / of.size.slices < micro_batches) put(a);
    }
  });
}

}  // namespace chevron
