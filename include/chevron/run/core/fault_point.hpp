#pragma once

#ifdef CHEVRON_FAULT_POINTS
#include CHEVRON_FAULT_POINTS
#else

#include <string_view>

#include <chevron/plan/action.hpp>

/// \file
/// Named points at which tests make a rank fail. Tests define CHEVRON_FAULT_POINTS, the name of a header with these functions
/// (tests/torture/fault_points.hpp); in all other programs the functions are empty.

namespace chevron::detail {

constexpr void fault_point(int, long, std::string_view) {}
constexpr void fault_point(int, long, std::string_view, action const&) {}

}  // namespace chevron::detail

#endif
