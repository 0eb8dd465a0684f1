#pragma once

#include <chevron/describe/list.hpp>

namespace chevron::catalogue {
namespace spelled_hanayo {
using namespace letters;

/// Hanayo (Liu et al., arXiv 2308.15762, its wave-like pipeline): the model runs through the ranks in waves, V/2 of them, and
/// turns without communication; each rank takes a backward as soon as there is one, else the forward that has come furthest. The
/// order is that of equally long forwards and backwards, and keeps at most V·min(M, P) chunks on a rank without being told to.
/// With f and b a chunk's forward and full backward: for M ≤ P the makespan is P·V(f+b) + 2(M-1)·max(f, b), which at M = P is a
/// bubble of 2(P-1)·max(f, b) for any number of waves; where f = b and P divides M the bubble stays (P-1)(f+b). With f ≠ b it
/// grows with M: the schedule was made for steps of about P microbatches.
inline constexpr auto hanayo =
    schedule_of(work_graph::full_backward).place(placement::waves).prefer(B, F).assuming({1, 0.5, 0.5}).named("Hanayo");

}  // namespace spelled_hanayo
using spelled_hanayo::hanayo;
}  // namespace chevron::catalogue
