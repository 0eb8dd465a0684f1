#pragma once

/// \file
/// Which samples each rank trains on: `distributed_sampler`, for LibTorch's data loader and beside it; files of tokens,
/// `token_windows`.

#include <chevron/run/data/sampler.hpp>
#include <chevron/run/data/token_file.hpp>
#include <chevron/run/data/token_windows.hpp>
