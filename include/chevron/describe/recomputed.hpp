#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Recomputation ahead of the backward, for any plan.

namespace chevron {

/// A plan with an R before each B or I of some stages, or before the fused pair that it is in. The rank then recomputes the
/// forward as soon as it is free, while the gradient is still on its way, and not inside B or I. The result is lawful if `of` is,
/// and must be proved again. (Mario, Liu et al., PPoPP 2025, §4, moves recomputation into bubbles.)
/// \param stages one entry for each stage, whether it gets R's; null: all stages but the last, where most schedules run B
/// directly
///     after F, so that R frees no memory
/// \returns a plan with the same name; stages with R's must recompute (`stage::recompute`)
constexpr plan with_recomputation(plan_view const& of, bool const* stages = nullptr) {
  plan made;
  static_cast<plan_facts&>(made) = of;
  made.name = of.name;
  detail::copy_bytes(of, made);
  made.actions = buffer<action>(of.total() + of.stages * of.size.units());
  made.begin = buffer<int>(of.size.ranks + 1);
  made.rank_of = buffer<std::int16_t>(of.stages);
  for (int s = 0; s < of.stages; ++s) made.rank_of.data[s] = of.rank_of[s];
  auto const runs_again = [&](action a) {
    int const stage = static_cast<int>(a.stage);
    return makes_input_gradient(a.kind) && (stages == nullptr ? stage + 1 < of.stages : stages[stage]);
  };
  int filled = 0;
  for (int r = 0; r < of.size.ranks; ++r) {
    made.begin.data[r] = filled;
    for (int i = of.begin[r]; i < of.begin[r + 1]; ++i) {
      action const a = of.actions[i];
      bool const second = i > of.begin[r] && of.actions[i - 1].fused != 0;
      action const backward = a.fused != 0 ? of.actions[i + 1] : a;
      if (!second && runs_again(backward))
        made.actions.data[filled++] =
            make_action(kind::recompute, static_cast<int>(backward.stage), static_cast<int>(backward.micro_batch));
      made.actions.data[filled++] = a;
    }
  }
  made.begin.data[of.size.ranks] = filled;
  made.actions.count = filled;
  return made;
}

}  // namespace chevron
