#pragma once

#include <cstdio>
#include <random>
#include <string>

/// \file
/// Names that nobody else draws.

namespace chevron::detail {

/// \param words so many times 8 hexadecimal digits
inline std::string random_digits(int words) {
  std::random_device random;
  std::string out;
  for (int i = 0; i < words; ++i) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", random());
    out += digits;
  }
  return out;
}

}  // namespace chevron::detail
