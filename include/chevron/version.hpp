#pragma once

/// \file
/// The version of this library. The build reads the three numbers from this file; they are written nowhere else.

#define CHEVRON_VERSION_MAJOR 0
#define CHEVRON_VERSION_MINOR 1
#define CHEVRON_VERSION_PATCH 0

#define CHEVRON_DETAIL_TEXT_OF(x) #x
#define CHEVRON_DETAIL_TEXT(x) CHEVRON_DETAIL_TEXT_OF(x)
/// The version as a string literal, `"0.1.0"`, which adjacent literals can extend.
#define CHEVRON_VERSION                      \
  CHEVRON_DETAIL_TEXT(CHEVRON_VERSION_MAJOR) \
  "." CHEVRON_DETAIL_TEXT(CHEVRON_VERSION_MINOR) "." CHEVRON_DETAIL_TEXT(CHEVRON_VERSION_PATCH)

namespace chevron {

/// The version as text. While the first number is 0, a new second number may break users' code, a new third number does not.
inline constexpr char const* version = CHEVRON_VERSION;

}  // namespace chevron
