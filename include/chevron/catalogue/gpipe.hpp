#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_gpipe {
using namespace letters;

/// GPipe (Huang et al., arXiv 1811.06965 §2.3): every forward, then every backward. Makespan M(T_F+T_B) + (P-1)(T_F+T_B) with
/// T_B the full backward; each rank keeps M chunks.
inline constexpr auto gpipe = schedule(placement::linear, steady(F) | cooldown(B)).named("GPipe");

}  // namespace spelled_gpipe
using spelled_gpipe::gpipe;
}  // namespace chevron::catalogue
