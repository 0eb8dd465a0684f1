#pragma once

#include <cstdint>

/// \file
/// The memory that stages take on a rank, in bytes.

namespace chevron {

/// Bytes of stages as analyses read them: one entry for each stage.
struct footprint_view {
  std::int64_t const* fixed = nullptr;       ///< held all the time: parameters, gradients, the optimizer's state
  std::int64_t const* activation = nullptr;  ///< for one microbatch, held from its F until its B or I has run
  std::int64_t const* kept = nullptr;        ///< for one microbatch, from I until W; with gradients, so may exceed `activation`
  std::int64_t const* input = nullptr;       ///< of `activation`, the part that a recomputed stage holds until its B or I
  bool const* recomputed = nullptr;          ///< whether each stage is recomputed; null: none is

  constexpr bool is_recomputed(int stage) const { return recomputed != nullptr && recomputed[stage]; }
  /// Bytes that are held after F.
  constexpr std::int64_t after_forward(int stage) const { return is_recomputed(stage) ? input[stage] : activation[stage]; }
};

}  // namespace chevron
