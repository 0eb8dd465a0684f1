#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_looped_bfs {
using namespace letters;

/// Looped breadth-first (Lamy-Poirier, arXiv 2211.05953 §3): V chunks on each rank; a rank runs all microbatches of a chunk
/// before the next chunk, and backwards in reverse order. For M ≥ P the makespan is interleaved 1F1B's. Every rank keeps all
/// V·M chunks, but each chunk's gradients are complete early, which suits sharded data parallelism.
inline constexpr auto looped_bfs = schedule(placement::loop, breadth_first, steady(F) | cooldown(B)).named("LoopedBFS");

}  // namespace spelled_looped_bfs
using spelled_looped_bfs::looped_bfs;
}  // namespace chevron::catalogue
