#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

/// \file
/// Strings that functions can build while compiling.

namespace chevron {

/// A string of at most N characters that can be a template argument, so that the compiler's error message contains a sentence
/// computed while compiling.
template <std::size_t N>
struct fixed_string {
  char characters[N + 1]{};

  constexpr fixed_string() = default;
  constexpr fixed_string(char const (&literal)[N + 1]) {
    for (std::size_t i = 0; i < N; ++i) characters[i] = literal[i];
  }
  constexpr std::string_view view() const {
    std::size_t length = 0;
    while (length < N && characters[length] != 0) ++length;
    return {characters, length};
  }
  constexpr operator std::string_view() const { return view(); }
};
template <std::size_t N>
fixed_string(char const (&)[N]) -> fixed_string<N - 1>;

/// A string of fixed capacity to which `append` adds, without allocation; longer text is cut off.
struct text {
  static constexpr int capacity = 511;
  char characters[capacity + 1]{};
  int length = 0;

  constexpr text& append(char c) {
    if (length < capacity) characters[length++] = c;
    return *this;
  }
  constexpr text& append(char const* words) {
    for (; *words != 0; ++words) append(*words);
    return *this;
  }
  constexpr text& append(std::string_view words) {
    for (char c : words) append(c);
    return *this;
  }
  constexpr text& append(int number) { return append(static_cast<std::int64_t>(number)); }
  constexpr text& append(std::int64_t number) {
    if (number < 0) append('-');
    std::uint64_t left = number < 0 ? 0 - static_cast<std::uint64_t>(number) : static_cast<std::uint64_t>(number);
    char digits[20]{};
    int count = 0;
    do {
      digits[count++] = static_cast<char>('0' + left % 10);
      left /= 10;
    } while (left != 0);
    while (count > 0) append(digits[--count]);
    return *this;
  }
  constexpr std::string_view view() const { return {characters, static_cast<std::size_t>(length)}; }
  std::string str() const { return std::string(view()); }
  template <class Traits>
  friend std::basic_ostream<char, Traits>& operator<<(std::basic_ostream<char, Traits>& out, text const& t) {
    return out << t.view();
  }
};

/// The text of a value that has an `append(text&, value)`: `to_text(action)` returns, for example, `3F0`.
template <class Value>
constexpr text to_text(Value const& value) {
  text out;
  append(out, value);
  return out;
}

}  // namespace chevron
