#pragma once

#include <cstdint>

#include <chevron/plan/buffer.hpp>

/// \file
/// The sizes of activations and messages that stages declare, in bytes.

namespace chevron {

inline constexpr std::int64_t no_bytes = 0;

/// Sizes as analyses read them: one entry for each stage, or one for all (`stride` 0).
struct size_view {
  std::int64_t const* activation = nullptr;  ///< bytes that a stage stores for one microbatch from its F to its B or W
  std::int64_t const* message = nullptr;     ///< entry s: bytes of an activation, or of its gradient, between stages s and s + 1
  int stride = 0;
  /// The part of `activation` that is the stage's inputs: if an R runs the stage again, only this part is stored from F to R.
  /// 0: not known; all of `activation` then counts.
  std::int64_t const* input = &no_bytes;
  int input_stride = 0;

  constexpr std::int64_t activation_of(int stage) const { return activation[stage * stride]; }
  constexpr std::int64_t input_of(int stage) const {
    std::int64_t const bytes = input[stage * input_stride];
    return bytes == 0 ? activation_of(stage) : bytes;
  }
  constexpr std::int64_t message_of(int boundary) const { return message[boundary * stride]; }
};

/// Sizes that are the same for every stage.
struct sizes {
  std::int64_t activation = 0;
  std::int64_t message = 0;
  std::int64_t input = 0;  ///< the part of `activation` that is inputs, for plans with R; 0: all of it

  constexpr size_view view() const { return {&activation, &message, 0, &input, 0}; }
  constexpr operator size_view() const { return view(); }
};

/// Sizes for each stage and boundary, in arrays, so that they can be a compile-time value.
template <int Stages>
struct stage_sizes {
  std::int64_t activation[array_size(Stages)]{};
  std::int64_t message[array_size(Stages)]{};  ///< entry s: between stages s and s + 1; the last is not used
  std::int64_t input[array_size(Stages)]{};    ///< the part of `activation` that is inputs, for plans with R; 0: all of it

  constexpr size_view view() const { return {activation, message, 1, input, 1}; }
  constexpr operator size_view() const { return view(); }
};

}  // namespace chevron
