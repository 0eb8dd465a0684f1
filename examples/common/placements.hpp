#pragma once

#include <string_view>

#include <chevron/plan/placement.hpp>

/// Placements by the names that users write: linear, loop, vee, wave.
namespace placements {

/// Calls `use` with the placement of a name that was looked at.
template <class Use>
auto on(std::string_view name, Use const& use) {
  if (name == "loop") return use(chevron::placement::loop);
  if (name == "vee") return use(chevron::placement::vee);
  if (name == "wave") return use(chevron::placement::waves);
  return use(chevron::placement::linear);
}

/// Whether it can have so many chunks on each rank.
constexpr bool exist(std::string_view name, int chunks) {
  if (name == "linear") return chunks == 1;
  if (name == "vee") return chunks == 2;
  return name != "wave" || chunks % 2 == 0;
}

}  // namespace placements
