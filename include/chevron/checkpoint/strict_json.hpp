#pragma once

#include <cstddef>
#include <exception>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

/// \file
/// Parses JSON of files that may be damaged or malicious.

namespace chevron::detail {

/// Returns the first 200 bytes of an error's message, in which a parser may quote megabytes.
inline std::string in_short(std::exception const& e) {
  std::string const words = e.what();
  std::size_t const most = 200;
  return words.size() <= most ? words : words.substr(0, most) + "…";
}

/// Parses JSON. \param most_deep greatest depth of nested objects and arrays
/// \throws std::exception for a text that is no JSON, is deeper than `most_deep`, or has a key twice
inline nlohmann::json parse_strictly(std::string_view text, int most_deep) {
  using json = nlohmann::json;
  std::vector<std::set<std::string>> keys;  // of the objects that are open, by depth
  return json::parse(text, [&](int depth, json::parse_event_t event, json const& at) {
    auto const level = static_cast<std::size_t>(depth);
    bool const opens = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth >= most_deep)
      throw std::runtime_error("it has more than " + std::to_string(most_deep) + " objects and arrays within each other");
    if (event == json::parse_event_t::object_start) {
      keys.resize(level + 2);
      keys.back().clear();
    }
    if (event == json::parse_event_t::key && !keys[level].insert(at.get<std::string>()).second)
      throw std::runtime_error("'" + at.get<std::string>() + "' is there twice");
    return true;
  });
}

}  // namespace chevron::detail
