#pragma once

/// \file
/// Chooses the samples that each rank trains on: `distributed_sampler`, with or without LibTorch's data loader; and reads files
/// of tokens: `token_windows`.

#include <chevron/data/sampler.hpp>
#include <chevron/data/token_file.hpp>
#include <chevron/data/token_windows.hpp>
