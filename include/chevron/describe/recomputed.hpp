#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Adds recomputation before backwards to any plan.

namespace chevron {

/// Returns a plan with an R before each B or I of some stages or, if B or I is half of a fused pair, before the pair. The rank
/// then recomputes the forward as soon as the rank is free, while the gradient is still on its way, and not within B or I. The
/// result is lawful if `of` is, and must be proved again. (Mario, Liu et al., PPoPP 2025, §4, moves recomputation into
/// bubbles.)
/// \param stages by stage: whether to add R's; null: to all stages but the last, where most schedules run B directly after F,
/// so that an R would free no memory
/// \returns a plan with the same name; stages with R's must recompute (`stage::recompute`)
constexpr plan with_recomputation(plan_view const& of, bool const* stages = nullptr) {
  auto const runs_again = [&](action a) {
    int const stage = static_cast<int>(a.stage);
    return makes_input_gradient(a.kind) && (stages == nullptr ? stage + 1 < of.stages : stages[stage]);
  };
  return detail::with_lists(of, of.total() + of.stages * of.size.units(), [&](int rank, auto const& put) {
    for (int i = of.begin[rank]; i < of.begin[rank + 1]; ++i) {
      action const a = of.actions[i];
      bool const second = i > of.begin[rank] && of.actions[i - 1].fused != 0;
      action const backward = a.fused != 0 ? of.actions[i + 1] : a;
      if (!second && runs_again(backward))
        put(make_action(kind::recompute, static_cast<int>(backward.stage), static_cast<int>(backward.micro_batch)));
      put(a);
    }
  });
}

}  // namespace chevron
