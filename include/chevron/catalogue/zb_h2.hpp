#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_zb_h2 {
using namespace letters;

/// ZB-H2 (Qi et al., arXiv 2401.10241 §2.3): ZB-H1 with twice the warm-up, and weight gradients delayed twice as far, which
/// fills the idle time before the first backward. For M ≥ 2P-1 and T_W ≤ min(T_F, T_I) the bubble of the span is (P-1)(T_F +
/// T_I - 2T_W), zero at equal costs. With an optimizer that waits for all ranks, the makespan counts: its bubble is
/// (P-1)·max(T_F, T_F + T_I - 2T_W). Every rank keeps 2P-1 chunks.
inline constexpr auto zb_h2 = schedule(placement::linear, warmup(F * (2 * (ranks - 1 - rank))) | steady((F + I) * (2 * rank)) |
                                                              steady(F, I, W) | cooldown(I, W) | cooldown(W))
                                  .named("ZB-H2");

}  // namespace spelled_zb_h2
using spelled_zb_h2::zb_h2;
}  // namespace chevron::catalogue
