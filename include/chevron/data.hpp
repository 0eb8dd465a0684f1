#pragma once

/// \file
/// Samples for LibTorch's data loader, the same on all ranks of a pipeline: `distributed_sampler`.

#include <chevron/run/data/sampler.hpp>
