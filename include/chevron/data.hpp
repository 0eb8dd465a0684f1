#pragma once

/// \file
/// Chooses the samples that each rank trains on: `distributed_sampler`, with or without LibTorch's data loader.

#include <chevron/data/sampler.hpp>
