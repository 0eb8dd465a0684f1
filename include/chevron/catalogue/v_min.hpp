#pragma once

#include <chevron/describe/block.hpp>

namespace chevron::catalogue {
namespace spelled_v_min {
using namespace letters;

/// Time slots between a block's forwards and its input gradients: as many as the memory limit allows, so that more microbatches
/// are in flight while the pipeline fills and drains. A rank then holds the two chunks of a microbatch for 6(2⌊(P+4)/3⌋ - 1)
/// slots together, and chunks that wait for their W add at most one chunk in flight.
inline constexpr auto gap = (2 * ranks + 1) % 3 * 2;

/// V-Min (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 §3): two chunks a rank in a V; from rank
/// to rank, forwards and input gradients start one time slot later, so that a microbatch's backward ends as early as possible:
/// at most 2⌊(P+4)/3⌋ half-sized chunks in flight on any rank, a third of what 1F1B's first rank holds.
///
/// At equal costs and M ≥ P the bubble is max(P-1, 4P-5-gap) chunk units: 4P-7, 4P-5, 4P-9 where P ≥ 3 and P mod 3 is 0, 1, 2.
/// At equal costs, for any M, no order of these chunks within this memory limit is shorter: tests compare the makespan with the
/// lower bound, for P ≤ 16 and M ≤ 48. The step from rank to rank takes as long as the slower of F and I: at other costs, and P
/// ≥ 3, the bubble grows with each microbatch by max(0, 6·max(T_F, T_I) - 2(T_F + T_I + T_W)). V-Half is better at unequal
/// costs, and for P ≤ 3 needs no more memory. Any P, any M.
///
/// The authors' code has no gap where P mod 3 is 2, and a bubble of 4P-5 in the same memory. For other P the order in a full
/// pipeline is that of the authors' code. Filling and draining take as long as in that code or, for small M, less.
inline constexpr auto v_min = building_block(placement::vee, every(6),                                              //
                                             F(0).at(rank), F(1).at(2 * ranks - 1 - rank),                          //
                                             I(1).at(2 * ranks + rank + gap), I(0).at(4 * ranks - 1 - rank + gap),  //
                                             W(1), W(0))
                                  .at_most_in_flight((ranks + 4) / 3 * 2)
                                  .named("V-Min");

}  // namespace spelled_v_min
using spelled_v_min::v_min;
}  // namespace chevron::catalogue
