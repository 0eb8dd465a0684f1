#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_one_f_one_b {
using namespace letters;

/// 1F1B (PipeDream-flush, Narayanan et al., arXiv 2006.09503 §2.2; Megatron-LM, arXiv 2104.04473 §2.2.1): as many forwards as ranks
/// follow, then one forward, one backward. GPipe's makespan, but rank r keeps min(M, P - r) chunks. Any M.
inline constexpr auto one_f_one_b =
    schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).named("1F1B");

}  // namespace spelled_one_f_one_b
using spelled_one_f_one_b::one_f_one_b;
}  // namespace chevron::catalogue
