#pragma once

#include <cstdint>

/// \file
/// What stages take of a rank's memory, in bytes.

namespace chevron {

/// Bytes seen by the analyses: one entry a stage.
struct footprint_view {
  std::int64_t const* fixed = nullptr;       ///< there all the time: parameters, gradients, the optimizer's state
  std::int64_t const* activation = nullptr;  ///< of a microbatch, from its F until its B or I has run
  std::int64_t const* kept = nullptr;        ///< from its I until its W: gradients, too, so it may be more than that
  std::int64_t const* input = nullptr;       ///< of `activation`, from F until its B or I begins, where it is recomputed
  bool const* recomputed = nullptr;          ///< which stages are; null: none

  constexpr bool is_recomputed(int stage) const { return recomputed != nullptr && recomputed[stage]; }
  /// What F leaves.
  constexpr std::int64_t after_forward(int stage) const { return is_recomputed(stage) ? input[stage] : activation[stage]; }
};

}  // namespace chevron
