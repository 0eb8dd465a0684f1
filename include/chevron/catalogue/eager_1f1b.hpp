#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_eager_1f1b {
using namespace letters;

/// Eager 1F1B (Zhuang et al., arXiv 2211.05322, MLSys 2023, the overlapping-friendly schedule; PaddlePaddle's Eager1F1B): 1F1B
/// with twice the warm-up, 2(P-r)-1 forwards before rank r's first backward, so that transfers overlap with computations. If a
/// message takes time c and 2c ≤ T_F+T_B, the makespan is M(T_F+T_B) + (P-1)(T_F+T_B+2c): only messages of the first microbatch
/// lengthen it, while 1F1B adds 2c⌊(M-1)(P-1)/P⌋. Rank r keeps at most min(M, 2(P-r)-1) chunks. Any M.
inline constexpr auto eager_1f1b =
    schedule(placement::linear, warmup(F*(2 * (ranks - 1 - rank))) | steady(F, B) | cooldown(B)).named("Eager1F1B");

}  // namespace spelled_eager_1f1b
using spelled_eager_1f1b::eager_1f1b;
}  // namespace chevron::catalogue
