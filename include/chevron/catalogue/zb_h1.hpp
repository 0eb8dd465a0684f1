#pragma once

#include <concepts>

#include <chevron/catalogue/slack.hpp>
#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_zb_h1 {
using namespace letters;

/// ZB-H1 (Qi et al., arXiv 2401.10241 §2.2): 1F1B with the backward split; rank r runs its weight gradients r microbatches
/// later, so that they fill the drain. Every rank keeps at most P chunks, as many as 1F1B's first rank. With T_I, T_W the times
/// of input and weight gradient (the paper's B and W) the bubble is (P-1)(T_F + T_I - T_W), exact while T_W ≤ min(T_F, T_I).
inline constexpr auto zb_h1 = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady((F + I) * rank) |
                                                              steady(F, I, W) | cooldown(I, W) | cooldown(W))
                                  .named("ZB-H1");

template <class Slacks>
constexpr auto zb_h1_for(Slacks const& all) {
  return schedule(placement::linear, warmup(F * (ranks - 1 - rank + slack_behind(all))) |
                                         steady((F + I) * (rank + slack_before(all))) | steady(F, I, W) | cooldown(I, W) |
                                         cooldown(W))
      .named("ZB-H1 with slack");
}

/// ZB-H1 for slow links: the ranks before a link run more forwards ahead, and the ranks after the link delay as many more W's,
/// so that each rank keeps P + e chunks with slack e. With one link of delay d after the first c ranks, e ≥ 2d/(T_F+T_I), T_W ≤
/// min(T_F, T_I) and M ≥ P + e, the makespan is M(T_F+T_I+T_W) plus the largest of (P-1)(T_F+T_I-T_W) + 2d - e·T_W, (P-1)·T_F +
/// d and c·T_F + (P-1-c)·T_I + d.
template <std::same_as<slack>... More>
constexpr auto zb_h1_with_slack(slack one, More... more) {
  return zb_h1_for(slacks<1 + sizeof...(More)>{{one, more...}});
}

}  // namespace spelled_zb_h1
using spelled_zb_h1::zb_h1;
using spelled_zb_h1::zb_h1_for;
using spelled_zb_h1::zb_h1_with_slack;
}  // namespace chevron::catalogue
