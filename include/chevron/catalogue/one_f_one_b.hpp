#pragma once

#include <concepts>

#include <chevron/catalogue/slack.hpp>
#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_one_f_one_b {
using namespace letters;

/// 1F1B (PipeDream-flush, Narayanan et al., arXiv 2006.09503 §2.2; Megatron-LM, arXiv 2104.04473 §2.2.1): a rank first runs as
/// many forwards as there are ranks after it, then one forward and one backward in turn. The makespan is GPipe's, but rank r
/// keeps only min(M, P - r) chunks. Any M.
inline constexpr auto one_f_one_b =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank)) | steady(F, B) | cooldown(B)).named("1F1B");

/// 1F1B in which all ranks but the last recompute each forward by an R before its B, so that recomputation is done when the
/// gradient arrives (Mario, Liu et al., PPoPP 2025). If stages are equally fast, the makespan is that of 1F1B with the
/// recomputation inside B, less (P-1)·T_R for R's that run before their gradient arrives, and less 2·T_R for the last rank,
/// which has no R (M ≥ 2). Rank r keeps min(M, P - r) chunks, at most one of them whole: from F to R only a chunk's inputs are
/// stored. Any M; the stages of all ranks but the last must recompute.
inline constexpr auto one_f_one_b_recompute =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank)) | steady(F, R* min_of(1, ranks - 1 - rank), B) |
                                    cooldown(R * min_of(1, ranks - 1 - rank), B))
        .named("1F1B-R");

template <class Slacks>
constexpr auto one_f_one_b_for(Slacks const& all) {
  return schedule(placement::linear, warmup(F * (ranks - 1 - rank + slack_behind(all))) | steady(F, B) | cooldown(B))
      .named("1F1B with slack");
}

/// 1F1B for slow links: the ranks before a link run more forwards ahead (Wu et al., arXiv 2504.19232). If stages are equally
/// fast and each link of delay d has slack of at least 2d/(T_F+T_B) forwards, the makespan is (M+P-1)(T_F+T_B) + 2·Σd, and no
/// schedule with whole backwards on this placement is shorter, for any M. With less slack, e forwards, each microbatch takes
/// 2(T_F+T_B+d)/(2+e) in the long run; in 1F1B, without slack, T_F+T_B+d. Rank r keeps min(M, P - r + s) chunks, where s is the
/// summed slack of the links between rank r and the last.
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
