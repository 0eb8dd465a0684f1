#pragma once

#include "common/ranks.hpp"

/// \file
/// From a command line to ranks that train.

namespace chevron::train {

/// The body of both programs; `argv` must be that of `main`. \param gpus null in chevron-train
int start(int argc, char** argv, gpu_side const* gpus);

}  // namespace chevron::train
