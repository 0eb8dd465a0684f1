#pragma once

/// \file
/// Profiles: the measured costs and bytes of stages, read from and written to a file's text. Needs nlohmann/json, not LibTorch.

#include <chevron/plan/profile.hpp>
#include <chevron/tools/show/profile_file.hpp>
