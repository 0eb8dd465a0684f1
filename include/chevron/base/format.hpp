#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

/// \file
/// Formats numbers, and writes strings in JSON and XML.

namespace chevron::detail {

/// A number in at most `digits` significant digits, without trailing zeros: `16`, `0.25`.
inline std::string number_text(double value, int digits = 10) {
  std::string text(32, '\0');
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), "%.*g", digits, value)));
  return text;
}

/// Two different numbers as `number_text` writes them, in more digits where ten would give both one text.
inline std::pair<std::string, std::string> texts_apart(double first, double second) {
  int digits = 10;
  while (digits < 17 && number_text(first, digits) == number_text(second, digits)) ++digits;
  return {number_text(first, digits), number_text(second, digits)};
}

}  // namespace chevron::detail

namespace chevron::show {

/// A number for people: at most `digits` significant digits, no trailing zeros. Values nearer to 0 than 1e-9 become 0.
inline std::string number(double value, int digits = 6) {
  if (std::abs(value) < 1e-9) value = 0;
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
  return buffer;
}

/// A number with a fixed count of decimals.
inline std::string fixed(double value, int decimals) {
  if (std::abs(value) < 0.5 * std::pow(10.0, -decimals)) value = 0;  // no "-0.0"
  char buffer[340];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  return buffer;
}

/// A share as `5.9 %`.
inline std::string percent(double share) { return fixed(share * 100, 1) + " %"; }

/// A number of bytes for people: `640 B`, `1.5 GiB`.
inline std::string bytes(std::int64_t value) {
  static constexpr char const* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double size = static_cast<double>(value);
  int unit = 0;
  for (; std::abs(size) >= 1024 && unit < 6; ++unit) size /= 1024;
  return number(size, size < 1000 ? 3 : 4) + " " + units[unit];
}

/// A number for programs: the shortest text that reads back as the same double; `null` for infinity and NaN, which JSON lacks.
inline std::string exact(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[40];
  auto const done = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, done.ptr);
}

/// The length of the UTF-8 sequence at the front, or 0 if it is not well-formed (overlong forms, surrogates, cut-off sequences).
inline int utf8_length(std::string_view s) {
  auto const byte = [&](std::size_t i) { return static_cast<std::uint8_t>(s[i]); };
  std::uint8_t const first = byte(0);
  if (first < 0x80) return 1;
  int const length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || s.size() < static_cast<std::size_t>(length)) return 0;
  for (int i = 1; i < length; ++i) {
    if ((byte(static_cast<std::size_t>(i)) & 0xc0) != 0x80) return 0;
  }
  std::uint8_t const second = byte(1);
  bool const overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  bool const outside = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return overlong || outside ? 0 : length;
}

/// The number of columns of a text on a terminal, where every character is one column wide.
inline int columns_of(std::string_view s) {
  int count = 0;
  for (char c : s) count += (static_cast<std::uint8_t>(c) & 0xc0) != 0x80 ? 1 : 0;
  return count;
}

/// A JSON string, quotes included. Bytes that are not UTF-8 become the replacement character, so the output always parses.
inline std::string json_string(std::string_view s) {
  std::string out = "\"";
  while (!s.empty()) {
    int const length = utf8_length(s);
    char const c = s.front();
    if (length == 0) {
      out += "\xef\xbf\xbd";
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<std::uint8_t>(c) < 0x20 || c == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += s.substr(0, static_cast<std::size_t>(length));
    }
    s.remove_prefix(static_cast<std::size_t>(length == 0 ? 1 : length));
  }
  return out += '"';
}

/// A list in JSON. \param spell the text of a value
template <class Values, class Spell>
std::string json_list(Values const& values, Spell spell, char const* between = ", ") {
  std::string out = "[";
  for (auto const& value : values) out += (out.size() > 1 ? between : "") + spell(value);
  return out + "]";
}

/// Text for XML and HTML, inside an element or a quoted attribute. Characters that XML cannot hold become the replacement
/// character.
inline std::string xml_text(std::string_view s) {
  std::string out;
  while (!s.empty()) {
    int const length = utf8_length(s);
    char const c = s.front();
    bool const control = static_cast<std::uint8_t>(c) < 0x20 && c != '\n' && c != '\t';
    if (length == 0 || control)
      out += "\xef\xbf\xbd";
    else if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else
      out += s.substr(0, static_cast<std::size_t>(length));
    s.remove_prefix(static_cast<std::size_t>(length == 0 ? 1 : length));
  }
  return out;
}

/// Numbers of a list: `8 on every rank` when they are all the same, else `4 3 2 1`.
template <class Numbers>
std::string per_rank(Numbers const& values) {
  bool same = values.size() > 1;
  for (auto const& value : values) same = same && value == values.front();
  if (same) return std::to_string(values.front()) + " on every rank";
  std::string out;
  for (auto const& value : values) out += (out.empty() ? "" : " ") + std::to_string(value);
  return out;
}

/// The step of an axis that has about `wanted` marks over `length`: 1, 2 or 5 times a power of ten.
inline double axis_step(double length, double wanted) {
  if (!(length > 0) || !(wanted > 0)) return 1;
  double const rough = length / wanted;
  double const power = std::pow(10.0, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

}  // namespace chevron::show
