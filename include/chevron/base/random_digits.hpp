#pragma once

#include <cstdio>
#include <random>
#include <string>

/// \file
/// Random names that are unique in practice.

namespace chevron::detail {

/// Returns random hexadecimal digits, from the system's random source. \param words number of groups of eight digits
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
