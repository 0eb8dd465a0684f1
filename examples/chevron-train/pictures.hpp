#pragma once

#include "measure.hpp"
#include "options.hpp"

/// \file
/// The files a run leaves behind.

namespace chevron::train {

/// Before anything is trained: can all files that were asked for be written? A `usage_error` names the flag and the file if not.
void check_files(options const& o);

/// Draws the typical step, predicted above measured, writes its trace and the profile, and prints where they are.
void write_files(options const& o, comparison const& outcome);

}  // namespace chevron::train
