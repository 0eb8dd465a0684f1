#pragma once

/// \file
/// <chevron/multiprocess.hpp>, and ranks on GPUs: `nccl_transport`, CUDA graphs. Link chevron::nccl.

#include <chevron/multiprocess.hpp>
#include <chevron/run/cuda_devices.hpp>
#include <chevron/run/cuda_graph.hpp>
#include <chevron/run/nccl.hpp>
