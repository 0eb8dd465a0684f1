#pragma once

/// \file
/// Includes <chevron/multiprocess.hpp> and adds ranks on GPUs: `run_gpus`, `nccl_transport`, `copy_transport`, CUDA graphs. A
/// program that includes this file must link chevron::nccl.

#include <chevron/multiprocess.hpp>
#include <chevron/transports/gpu/copy_transport.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/cuda_graph.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>
#include <chevron/transports/gpu/run_gpus.hpp>
#include <chevron/transports/gpu/shared_gpus.hpp>
