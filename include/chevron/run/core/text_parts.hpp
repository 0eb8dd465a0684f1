#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// \file
/// The parts of texts that ranks exchange: lines and fields of a line; numbers, and texts of any characters.

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

/// Appends a number, for `text_reader`.
inline void add_number(std::string& to, std::size_t number) { to += std::to_string(number) + " "; }
/// Appends a text of any characters, after its size, for `text_reader`.
inline void add_text(std::string& to, std::string_view text) {
  add_number(to, text.size());
  to += text;
}

/// Reads numbers and texts in the order in which `add_number` and `add_text` have appended them.
class text_reader {
 public:
  /// \param all must outlive this object
  explicit text_reader(std::string_view all) : at_(all.data()), end_(all.data() + all.size()) {}

  bool at_end() const { return at_ == end_; }
  std::size_t number() {
    std::size_t value = 0;
    at_ = std::from_chars(at_, end_, value).ptr + 1;
    return value;
  }
  std::string text() {
    std::size_t const size = number();
    return {std::exchange(at_, at_ + size), size};
  }

 private:
  char const *at_, *end_;
};

}  // namespace chevron::detail
