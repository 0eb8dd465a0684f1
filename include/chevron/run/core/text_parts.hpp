#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

/// \file
/// The parts of texts that ranks exchange: lines, and fields of a line.

namespace chevron::detail {

/// Returns the parts of a text. Each part ends at the character `end`; only the last part may lack it.
inline std::vector<std::string> parts_of(std::string_view text, char end) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size(); at += out.back().size() + 1)
    out.emplace_back(text.substr(at, std::min(text.find(end, at), text.size()) - at));
  return out;
}

/// Splits both texts by `parts_of`. \returns the first part of `b` that differs from `a`'s part of the same number; empty: none
inline std::string first_difference(std::string_view a, std::string_view b, char end) {
  auto const of_a = parts_of(a, end), of_b = parts_of(b, end);
  for (std::size_t i = 0; i < of_b.size(); ++i) {
    if (i >= of_a.size() || of_a[i] != of_b[i]) return of_b[i];
  }
  return "";
}

}  // namespace chevron::detail
