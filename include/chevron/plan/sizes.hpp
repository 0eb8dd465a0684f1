#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>

/// \file
/// What stages declare about memory and messages, in bytes.

namespace chevron {

inline constexpr std::int64_t no_bytes = 0;

/// Sizes seen by the analyses: one entry a stage, or one for all (`stride` 0).
struct size_view {
  std::int64_t const* activation = nullptr;  ///< held for one microbatch by stage s, from its F until its B or W
  std::int64_t const* message = nullptr;     ///< between stages s and s + 1, in entry s: an activation, or its gradient
  int stride = 0;
  /// Of `activation`, the inputs: held alone from F to R where an R runs the stage again. 0: not known, and so all of it.
  std::int64_t const* input = &no_bytes;
  int input_stride = 0;

  constexpr std::int64_t activation_of(int stage) const { return activation[stage * stride]; }
  constexpr std::int64_t input_of(int stage) const {
    std::int64_t const bytes = input[stage * input_stride];
    return bytes == 0 ? activation_of(stage) : bytes;
  }
  constexpr std::int64_t message_of(int boundary) const { return message[boundary * stride]; }
};

/// The same sizes for every stage.
struct sizes {
  std::int64_t activation = 0;
  std::int64_t message = 0;
  std::int64_t input = 0;  ///< of `activation`, with an R; 0: all of it

  constexpr size_view view() const { return {&activation, &message, 0, &input, 0}; }
  constexpr operator size_view() const { return view(); }
};

/// Sizes per stage and boundary, of fixed size, so that they can be a compile-time value.
template <int Stages>
struct stage_sizes {
  std::int64_t activation[array_size(Stages)]{};
  std::int64_t message[array_size(Stages)]{};  ///< entry s: between stages s and s + 1; the last has no meaning
  std::int64_t input[array_size(Stages)]{};    ///< of `activation`, with an R; 0: all of it

  constexpr size_view view() const { return {activation, message, 1, input, 1}; }
  constexpr operator size_view() const { return view(); }
};

}  // namespace chevron
