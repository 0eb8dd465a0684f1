#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_interleaved {
using namespace letters;

/// Interleaved 1F1B (Narayanan et al., arXiv 2104.04473 §2.2.2): V chunks on each rank, microbatches in rounds of P, so that the
/// bubble shrinks by V. Where P divides M the makespan is M(T_F+T_B) + (P-1)(T_F+T_B)/V. The published rule wants M to fill
/// whole rounds; here any M will do: rounds are filled evenly and never hold fewer than min(M, P) microbatches.
inline constexpr auto interleaved_1f1b =
    schedule(placement::loop, depth_first(ranks),
             warmup(F * ((chunks - 1) * round_of(ranks) + 2 * (ranks - 1 - rank))) | steady(F, B) | cooldown(B))
        .named("Interleaved1F1B");

}  // namespace spelled_interleaved
using spelled_interleaved::interleaved_1f1b;
}  // namespace chevron::catalogue
