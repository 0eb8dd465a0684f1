#pragma once

#include <chevron/describe/block.hpp>

namespace chevron::catalogue {
namespace spelled_v_min {
using namespace letters;

/// Between the halves of a block, so that those of different microbatches do not meet where 3 divides P.
inline constexpr auto gap = 2 * (1 - min_of(ranks % 3, 1));

/// V-Min (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 §3): two chunks a rank in a V and one slot
/// a hop throughout, so that a microbatch leaves as soon as it can: at most 2⌊(P+4)/3⌋ half-sized chunks in flight on any rank, a
/// third of what 1F1B's first rank holds.
///
/// At equal costs and M ≥ P ≥ 2 the bubble is 4P-5 chunk units, 4P-7 where 3 divides P. A hop lasts as long as the slower of F
/// and I: at other costs, and P ≥ 3, the bubble grows with each microbatch by max(0, 6·max(T_F, T_I) - 2(T_F + T_I + T_W)).
/// V-Half takes unequal costs better. Any P, any M. Once the pipeline is full the order is that of the authors' code; filling and
/// draining takes as long as there or, for small M, less.
inline constexpr auto v_min = building_block(placement::vee, every(6),                                              //
                                             F(0).at(rank), F(1).at(2 * ranks - 1 - rank),                          //
                                             I(1).at(2 * ranks + rank + gap), I(0).at(4 * ranks - 1 - rank + gap),  //
                                             W(1), W(0))
                                  .at_most_in_flight((ranks + 4) / 3 * 2)
                                  .named("V-Min");

}  // namespace spelled_v_min
using spelled_v_min::v_min;
}  // namespace chevron::catalogue
