#pragma once

#include <concepts>

#include <chevron/catalogue/slack.hpp>
#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_one_f_one_b {
using namespace letters;

/// 1F1B (PipeDream-flush, Narayanan et al., arXiv 2006.09503 §2.2; Megatron-LM, arXiv 2104.04473 §2.2.1): as many forwards as
/// ranks follow, then one forward, one backward. GPipe's makespan, but rank r keeps min(M, P - r) chunks. Any M.
inline constexpr auto one_f_one_b =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank)) | steady(F, B) | cooldown(B)).named("1F1B");

/// 1F1B whose ranks, the last one excepted, run each forward again by an R of its own, so that it is over when the gradient
/// arrives (Mario, Liu et al., PPoPP 2025). With one stage as fast as the next the makespan is that of 1F1B with the
/// recomputation inside B, less (P-1)·T_R for R's that hide while a gradient is on its way, and less 2·T_R for the last rank,
/// which has none (M ≥ 2). Rank r keeps min(M, P - r) chunks, from F to R as their inputs alone, so min(1, P - 1 - r) of them
/// whole. Any M; the stages of all ranks but the last must recompute.
inline constexpr auto one_f_one_b_recompute =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank)) | steady(F, R* min_of(1, ranks - 1 - rank), B) |
                                    cooldown(R * min_of(1, ranks - 1 - rank), B))
        .named("1F1B-R");

template <class Slacks>
constexpr auto one_f_one_b_for(Slacks const& all) {
  return schedule(placement::linear, warmup(F * (ranks - 1 - rank + slack_behind(all))) | steady(F, B) | cooldown(B))
      .named("1F1B with slack");
}

/// 1F1B for slow links: the ranks before a link run more forwards ahead (Wu et al., arXiv 2504.19232). With one stage as fast
/// as the next and slack of at least 2d/(T_F+T_B) forwards for each link of delay d, the makespan is (M+P-1)(T_F+T_B) + 2·Σd:
/// what no schedule with whole backwards on this placement beats, for any M. With e forwards too few, one link makes each
/// microbatch take 2(T_F+T_B+d)/(2+e) in the long run, 1F1B itself T_F+T_B+d. Rank r keeps min(M, P - r + the slack of the
/// links behind it) chunks.
template <std::same_as<slack>... More>
constexpr auto one_f_one_b_with_slack(slack one, More... more) {
  return one_f_one_b_for(slacks<1 + sizeof...(More)>{{one, more...}});
}

}  // namespace spelled_one_f_one_b
using spelled_one_f_one_b::one_f_one_b;
using spelled_one_f_one_b::one_f_one_b_for;
using spelled_one_f_one_b::one_f_one_b_recompute;
using spelled_one_f_one_b::one_f_one_b_with_slack;
}  // namespace chevron::catalogue
