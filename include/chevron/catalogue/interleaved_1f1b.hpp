#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_interleaved {
using namespace letters;

/// The phases of interleaved 1F1B, for an order that makes rounds.
/// \param round the number of microbatches in the first round, the largest
template <class Order, class Round>
constexpr auto in_rounds(Order order, Round round) {
  return schedule(placement::loop, order,
                  warmup(F * ((chunks - 1) * round + 2 * (ranks - 1 - rank))) | steady(F, B) | cooldown(B))
      .named("Interleaved1F1B");
}

/// Interleaved 1F1B (Narayanan et al., arXiv 2104.04473 §2.2.2): V chunks on each rank, microbatches in rounds of P, so that
/// the bubble shrinks by V. Where P divides M the makespan is M(T_F+T_B) + (P-1)(T_F+T_B)/V. The published rule needs an M that
/// fills whole rounds. Here any M is allowed: rounds are filled evenly, with at least min(M, P) microbatches each.
inline constexpr auto interleaved_1f1b = in_rounds(depth_first(ranks), round_of(ranks));

/// Interleaved 1F1B with rounds of N microbatches in place of P (Megatron-LM's microbatch_group_size_per_vp_stage). For any M ≥
/// P the makespan is M(T_F+T_B) + (P-1)(T_F+T_B)/V, with min(MV, (V-1)·N + 2(P-1-r) + 1) chunks in flight on rank r. Larger
/// groups need more memory and give transfers between a rank's chunks more time.
/// \param group N, a number or a rank expression, at least min(M, P). If the last group is incomplete and has fewer than P
/// microbatches, these join the first group, whose size then replaces N.
template <expression::operand Group>
constexpr auto interleaved_1f1b_with(Group group) {
  return in_rounds(in_groups_of(group), first_group_of(group));
}

}  // namespace spelled_interleaved
using spelled_interleaved::interleaved_1f1b;
using spelled_interleaved::interleaved_1f1b_with;
}  // namespace chevron::catalogue
