// Parsed once for all of tests/gpu. doctest's header stands last: it and LibTorch both define CHECK, and the last one wins.
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include "../cmake/precompiled/libtorch.hpp"

#include <doctest/doctest.h>
