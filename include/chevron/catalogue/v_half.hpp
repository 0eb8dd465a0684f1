#pragma once

#include <chevron/describe/block.hpp>

namespace chevron::catalogue {
namespace spelled_v_half {
using namespace letters;

/// Time slots between a block's forwards and its input gradients; without them, for even P, blocks of different microbatches
/// would need the same slot of a rank.
inline constexpr auto gap = 3 * (1 - ranks % 2);

/// V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 §3): two chunks a rank in a V; from
/// rank to rank the forward of the first chunk starts two time slots later, that of the second chunk one, the input gradient of
/// the second chunk two and that of the first one. So every rank holds a microbatch for about the same time, half as long as
/// 1F1B's first rank does: at most 2⌊(P+2)/2⌋ half-sized chunks in flight on any rank.
///
/// At equal costs and M ≥ P the bubble is 3P-7 chunk units for even P ≥ 4, 3P-4 for odd P ≥ 3 (whose block has no gap), 1 for
/// P=2. At any costs the bubble grows with each microbatch by max(0, 2T_F - 2T_I - T_W, 2T_I - 2T_F - T_W), which is mostly
/// zero. Any P, any M. Once the pipeline is full, the order is that of the authors' code; filling and draining take as long as
/// in that code or, for small M, less.
inline constexpr auto v_half = building_block(placement::vee, every(6),                                                      //
                                              F(0).at(2 * rank), F(1).at(3 * ranks - 2 - rank),                              //
                                              I(1).at(3 * ranks - 1 + 2 * rank + gap), I(0).at(6 * ranks - 2 - rank + gap),  //
                                              W(1), W(0))
                                   .at_most_in_flight((ranks + 2) / 2 * 2)
                                   .named("V-Half");

}  // namespace spelled_v_half
using spelled_v_half::v_half;
}  // namespace chevron::catalogue
