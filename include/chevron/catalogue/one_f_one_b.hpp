#pragma once

#include <concepts>

#include <chevron/catalogue/slack.hpp>
#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_one_f_one_b {
using namespace letters;

/// 1F1B (PipeDream-flush, Narayanan et al., arXiv 2006.09503 §2.2; Megatron-LM, arXiv 2104.04473 §2.2.1): as many forwards as ranks
/// follow, then one forward, one backward. GPipe's makespan, but rank r keeps min(M, P - r) chunks. Any M.
inline constexpr auto one_f_one_b =
    schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).named("1F1B");

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
using spelled_one_f_one_b::one_f_one_b_with_slack;
}  // namespace chevron::catalogue
