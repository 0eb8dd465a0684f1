#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_zb_v {
using namespace letters;

/// ZB-V (Qi et al., arXiv 2401.10241 §6): two chunks a rank in a V, so that a microbatch's backward can start on the rank where
/// its forward ended. The memory is 1F1B's (2P half-sized chunks on every rank); at equal costs the bubble of the span is zero
/// for M ≥ 2P-1. The order is PyTorch's ScheduleZBVZeroBubble, also for smaller M: the pattern for 2P-1 microbatches is
/// expanded, and actions of microbatches from M on are left out.
inline constexpr auto zb_v =
    schedule(placement::vee,
             warmup(F(0) * (2 * (ranks - rank) - 1)) | warmup((F(1) + F(0)) * rank) |  //
                 warmup((F(1) + I(1) + W(1)) * (ranks - rank)) |                       //
                 steady(F(0), I(0), W(0), F(1), I(1), W(1)) |                          //
                 cooldown((I(0) + I(1)) * rank) | cooldown((I(0) + W(0)) * (ranks - rank)) | cooldown(W(1)) | cooldown(W(0)))
        .expand_for_at_least(2 * ranks - 1)
        .named("ZBVZeroBubble");

}  // namespace spelled_zb_v
using spelled_zb_v::zb_v;
}  // namespace chevron::catalogue
