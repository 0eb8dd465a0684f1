#pragma once

#include <cstdio>
#include <string>

/// \file
/// Formats numbers for messages.

namespace chevron::detail {

/// A number in at most ten significant digits, without trailing zeros: `16`, `0.25`.
inline std::string number_text(double value) {
  std::string text(32, '\0');
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), "%.10g", value)));
  return text;
}

}  // namespace chevron::detail
