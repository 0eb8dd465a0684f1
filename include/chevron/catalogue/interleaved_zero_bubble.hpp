#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_interleaved_zero_bubble {
using namespace letters;

/// Interleaved zero bubble (PyTorch's ScheduleInterleavedZeroBubble, "ZB1P"): ZB-H1 with V chunks a rank. Half the warm-up of
/// interleaved 1F1B per hop, weight gradients put off by r chunks on rank r. Where P divides M and T_W ≤ min(T_F, T_I) the
/// bubble is (P-1)(T_F + T_I - T_W)/V with V·P chunks in flight on every rank; with one chunk it is ZB-H1, action by action.
inline constexpr auto interleaved_zero_bubble =
    schedule(placement::loop, depth_first(ranks),
             warmup(F * ((chunks - 1) * round_of(ranks) + ranks - 1 - rank)) | steady((F + I) * rank) | steady(F, I, W) |
                 cooldown(I, W) | cooldown(W))
        .named("InterleavedZeroBubble");

}  // namespace spelled_interleaved_zero_bubble
using spelled_interleaved_zero_bubble::interleaved_zero_bubble;
}  // namespace chevron::catalogue
