#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_zb_h1 {
using namespace letters;

/// ZB-H1 (Qi et al., arXiv 2401.10241 §2.2): 1F1B with the backward split; rank r puts its weight gradients off by r
/// microbatches, so that they fill the drain. Every rank keeps at most P chunks, as 1F1B's first rank does. With T_I, T_W the
/// input and weight gradient (the paper's B and W) the bubble is (P-1)(T_F + T_I - T_W), exact while T_W ≤ min(T_F, T_I).
inline constexpr auto zb_h1 = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady((F + I) * rank) |
                                                              steady(F, I, W) | cooldown(I, W) | cooldown(W))
                                  .named("ZB-H1");

}  // namespace spelled_zb_h1
using spelled_zb_h1::zb_h1;
}  // namespace chevron::catalogue
