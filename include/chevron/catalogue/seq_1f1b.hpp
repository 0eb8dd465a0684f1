#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_seq_1f1b {
using namespace letters;

/// Seq1F1B (Sun et al., arXiv 2406.03488 §3): 1F1B whose unit is a slice of a sequence. Forwards take the slices in order,
/// backwards in reverse, so a rank runs slices - 1 forwards more before its first backward. With k slices of equal time, and
/// T_F, T_B of a whole microbatch, the bubble is (P-1)(T_F+T_B)/k, and rank r keeps min(P - 1 - r + k, Mk) slices. With one
/// slice the schedule is 1F1B. Any M.
inline constexpr auto seq_1f1b =
    schedule(placement::linear, warmup(F*(ranks - 1 - rank + slices - 1)) | steady(F, B) | cooldown(B)).named("Seq1F1B");

/// Seq1F1B in which rank r runs `ahead` more forwards before its first backward, for links whose delay is near the time of a
/// slice, since each slice waits for its message and its gradient. Each rank keeps `ahead` more slices. With `ranks - 1 - rank`
/// a rank runs twice as far ahead of later ranks as in Seq1F1B, like Eager1F1B.
/// \param ahead a number or a rank expression
template <expression::operand Ahead>
constexpr auto seq_1f1b_with(Ahead ahead) {
  return schedule(placement::linear, warmup(F * (ranks - 1 - rank + slices - 1 + ahead)) | steady(F, B) | cooldown(B))
      .named("Seq1F1B");
}

/// Seq1F1B with a split backward, by ZB-H1's rule (Qi et al., arXiv 2401.10241 §2.2): rank r runs its weight gradients r slices
/// later. Every rank keeps min(P + k - 1, Mk) slices. With k slices of equal time the bubble is (P-1)(T_F+T_I-T_W)/k, exact
/// while T_W ≤ min(T_F, T_I) and Mk ≥ P + k - 1. With one slice the schedule is ZB-H1. Any M.
inline constexpr auto seq_zb_h1 = schedule(placement::linear, warmup(F*(ranks - 1 - rank + slices - 1)) | steady((F + I) * rank) |
                                                                  steady(F, I, W) | cooldown(I, W) | cooldown(W))
                                      .named("SeqZB-H1");

/// The least number of microbatches that together have at least as many slices as there are ranks: the size of a round.
inline constexpr auto round_of_slices = (ranks + slices - 1) / slices;

/// Interleaved Seq1F1B: V chunks on each rank, in rounds with as many microbatches as make up at least P slices (similar to
/// SlimPipe, Li et al., arXiv 2504.14519, whose slices are of equal length; here of equal time). Where Mk ≥ P the makespan is
/// M(T_F+T_B) + (P-1)(T_F+T_B)/(kV). Rank r keeps min((V-1)·g·k + k + 2(P-1-r), MkV) slices of chunks, where g is the number of
/// microbatches in the first round, the largest. With one slice the schedule is Interleaved1F1B.
inline constexpr auto seq_interleaved_1f1b =
    schedule(placement::loop, depth_first(round_of_slices),
             warmup(F*((chunks - 1) * round_of(round_of_slices) * slices + slices - 1 + 2 * (ranks - 1 - rank))) | steady(F, B) |
                 cooldown(B))
        .named("SeqInterleaved1F1B");

}  // namespace spelled_seq_1f1b
using spelled_seq_1f1b::seq_1f1b;
using spelled_seq_1f1b::seq_1f1b_with;
using spelled_seq_1f1b::seq_interleaved_1f1b;
using spelled_seq_1f1b::seq_zb_h1;
}  // namespace chevron::catalogue
