#pragma once

#include <cstdio>
#include <string>

/// \file
/// Strings in JSON, for headers that do not include nlohmann-json.

namespace chevron::detail {

/// A string as a JSON literal, with quotes.
inline std::string json_text(std::string const& plain) {
  std::string out = "\"";
  for (char const c : plain) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace chevron::detail
