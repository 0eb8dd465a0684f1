#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/split.hpp>
#include <range/v3/view/transform.hpp>

#include "request.hpp"

/// \file
/// Flags that take one value for all stages or boundaries, or a list.

namespace plan_program {

inline std::string quoted(std::string const& value) { return "'" + value + "'"; }

inline constexpr char const* between_stages = "boundaries between stages";

/// One value for all `count` things, or one for each with commas between.
template <class Read>
auto value_list(std::string const& typed, std::string const& flag, int count, char const* things, Read read) {
  auto const value = [&](auto&& word) { return read(word | ranges::to<std::string>(), flag); };
  std::string const ended = typed + ",";  // else an empty word at the end would not count
  auto out = ended | ranges::views::split(',') | ranges::views::transform(value) | ranges::to<std::vector>();
  std::size_t const wanted = static_cast<std::size_t>(count);
  if (out.size() == 1) out.resize(std::max<std::size_t>(wanted, 1), out.front());
  if (out.size() != std::max<std::size_t>(wanted, 1)) {
    throw usage(flag + " " + quoted(typed) + " has " + std::to_string(out.size()) + " values, but the schedule has " +
                std::to_string(count) + " " + things + ": give one for all, or " + std::to_string(count) +
                " separated by commas");
  }
  return out;
}

}  // namespace plan_program
