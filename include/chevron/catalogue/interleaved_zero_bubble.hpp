#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_interleaved_zero_bubble {
using namespace letters;

/// The phases of interleaved zero bubble, for an order that makes rounds.
/// \param round the number of microbatches in the first round, the largest
template <class Order, class Round>
constexpr auto in_rounds(Order order, Round round) {
  return schedule(placement::loop, order,
                  warmup(F * ((chunks - 1) * round + ranks - 1 - rank)) | steady((F + I) * rank) | steady(F, I, W) |
                      cooldown(I, W) | cooldown(W))
      .named("InterleavedZeroBubble");
}

/// Interleaved zero bubble (PyTorch's ScheduleInterleavedZeroBubble, "ZB1P"): ZB-H1 with V chunks a rank. Each rank's warm-up
/// is one forward longer than the next rank's (two in interleaved 1F1B), and rank r runs its weight gradients r chunks later.
/// Where P divides M and T_W ≤ min(T_F, T_I) the bubble is (P-1)(T_F + T_I - T_W)/V with V·P chunks in flight on every rank.
/// With one chunk the actions are ZB-H1's, in the same order.
inline constexpr auto interleaved_zero_bubble = in_rounds(depth_first(ranks), round_of(ranks));

/// Interleaved zero bubble with rounds of N microbatches in place of P, as in `interleaved_1f1b_with`. For any M ≥ P and T_W ≤
/// min(T_F, T_I) the bubble is (P-1)(T_F + T_I - T_W)/V, with (V-1)·N + P chunks in flight on every rank.
/// \param group N, a number or a rank expression, at least min(M, P)
template <expression::operand Group>
constexpr auto interleaved_zero_bubble_with(Group group) {
  return in_rounds(in_groups_of(group), first_group_of(group));
}

}  // namespace spelled_interleaved_zero_bubble
using spelled_interleaved_zero_bubble::interleaved_zero_bubble;
using spelled_interleaved_zero_bubble::interleaved_zero_bubble_with;
}  // namespace chevron::catalogue
