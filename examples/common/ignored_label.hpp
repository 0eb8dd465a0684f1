#pragma once

#include <cstdint>

/// \file
/// The label of tokens that the loss leaves out.

namespace chevron::train {

/// The target of a token whose prediction has no part in the loss: the default `ignore_index` of LibTorch's cross-entropy.
inline constexpr std::int64_t ignored_label = -100;

}  // namespace chevron::train
