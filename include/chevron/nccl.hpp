#pragma once

/// \file
/// Includes <chevron/multiprocess.hpp> and adds ranks on GPUs: `run_gpus`, `nccl_transport`, `copy_transport`, CUDA graphs. A
/// program that includes this file must link chevron::nccl.

#include <chevron/multiprocess.hpp>
#include <chevron/run/cuda/copy_transport.hpp>
#include <chevron/run/cuda/cuda_devices.hpp>
#include <chevron/run/cuda/cuda_graph.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>
#include <chevron/run/cuda/run_gpus.hpp>
