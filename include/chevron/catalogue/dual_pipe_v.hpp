#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_dual_pipe_v {
using namespace letters;

// 1 on the last rank, else 0. The last rank runs the first forward and the first backward of the main phase separately, since a
// fused backward would wait for the forward's input.
inline constexpr auto apart = max_of(0, rank + 2 - ranks);
inline constexpr auto half = (rank + 1) / 2;
inline constexpr auto odd = rank + 1 - half * 2;

/// DualPipeV (DeepSeek's DualPipe, "cut in half": two chunks a rank in a V, so each rank is both near the input and near the
/// loss). Its main phase runs a forward and a backward at once, which can hide each other's communication; the drain splits the
/// backward. The order is that of PyTorch's ScheduleDualPipeV, which asks for M ≥ 2P; for smaller M the pattern for 2P
/// microbatches is expanded, and actions of microbatches from M on are left out. At F = I the bubble is (P-1)(FB + B - 3W),
/// where FB = F + B is the time of a fused pair that hides nothing; if pairs take less, the bubble is at most as long. 2P+1
/// chunks are in flight. If pairs hide nothing, the bubble is twice ZB-V's: the gain is the time that pairs hide.
inline constexpr auto dual_pipe_v =
    schedule(placement::vee,
             warmup(F(0) * (2 * (ranks - 1 - rank))) | warmup((F(0) + F(1)) * (rank + 1)) |
                 warmup((I(1) + W + F(1)) * (ranks - 1 - rank)) |  //
                 steady((F(0) + B(1) + overlap(F(1), B(0))) * apart) |
                 steady((overlap(F(0), B(1)) + overlap(F(1), B(0))) * (terms::micro_batches + 1 + rank - 2 * ranks - apart)) |
                 cooldown((B(1) + overlap(F(1), B(0))) * (ranks - 1 - rank)) |  //
                 cooldown((B(1) + B(0)) * half) | cooldown((B(1) + I(0)) * odd) | cooldown((I(1) + I(0)) * half) |
                 cooldown((W + I(0)) * (ranks - 1 - rank)) | cooldown(W * (rank + 1)))
        .expand_for_at_least(2 * ranks)
        .named("DualPipeV");

}  // namespace spelled_dual_pipe_v
using spelled_dual_pipe_v::dual_pipe_v;
}  // namespace chevron::catalogue
