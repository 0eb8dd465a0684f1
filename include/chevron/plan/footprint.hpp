#pragma once

#include <cstdint>

/// \file
/// The memory that stages need on a rank, in bytes.

namespace chevron {

/// Bytes of stages as analyses read them: one entry for each stage.
struct footprint_view {
  std::int64_t const* fixed = nullptr;       ///< allocated all the time: parameters, gradients, the optimizer's state
  std::int64_t const* activation = nullptr;  ///< of one microbatch, from the start of its F to the end of its B or I
  std::int64_t const* kept = nullptr;        ///< of one microbatch, from I to W; includes gradients, so may exceed `activation`
  std::int64_t const* input = nullptr;       ///< the part of `activation` that a recomputed stage stores until its B or I
  bool const* recomputed = nullptr;          ///< by stage: whether its forward is recomputed; null: no stage's is

  constexpr bool is_recomputed(int stage) const { return recomputed != nullptr && recomputed[stage]; }
  /// Bytes of one microbatch after its F.
  constexpr std::int64_t after_forward(int stage) const { return is_recomputed(stage) ? input[stage] : activation[stage]; }
};

}  // namespace chevron
