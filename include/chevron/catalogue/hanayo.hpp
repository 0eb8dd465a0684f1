#pragma once

#include <chevron/describe/list.hpp>

namespace chevron::catalogue {
namespace spelled_hanayo {
using namespace letters;

/// Hanayo (Liu et al., arXiv 2308.15762, its wave-like pipeline): the stages lie along the ranks in V/2 waves; where a wave
/// turns, two neighbouring stages share a rank and need no communication. Each rank runs a backward as soon as one is ready,
/// otherwise the forward of the latest ready stage. The order is made for equally long forwards and backwards; at most V·min(M,
/// P) chunks are in flight on a rank, without a declared limit. With f and b a chunk's forward and full backward, the makespan
/// for M ≤ P is P·V(f+b) + 2(M-1)·max(f, b), which at M = P is a bubble of 2(P-1)·max(f, b) for any number of waves. Where f =
/// b and P divides M the bubble is (P-1)(f+b); with f ≠ b it grows with M: the schedule was made for steps of about P
/// microbatches.
inline constexpr auto hanayo =
    schedule_of(work_graph::full_backward).place(placement::waves).prefer(B, F).assuming({1, 0.5, 0.5}).named("Hanayo");

}  // namespace spelled_hanayo
using spelled_hanayo::hanayo;
}  // namespace chevron::catalogue
