#pragma once

#include <cstdlib>
#include <string>

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chevron/run/cuda_streams.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/run/stream_transport.hpp>

/// \file
/// The transport between GPUs: NCCL.

namespace chevron {

struct nccl_options {
  int device = -1;  ///< the GPU of this rank, as CUDA numbers those it may see; -1: the one with the rank's number on its machine
};

/// The GPU that a rank computes on, made this thread's current one.
/// \throws usage_error without a usable GPU of that number
inline at::Device gpu_of(int local_rank, nccl_options const& options = {}) {
  int count = 0;
  cudaError_t const found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    throw usage_error("NCCL needs GPUs, and CUDA sees none (" +
                      std::string(found != cudaSuccess ? cudaGetErrorString(found) : "no device") +
                      "). Remedy: a machine with a GPU and a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
                      std::to_string(CUDART_VERSION % 1000 / 10) + ", or --backend gloo");
  }
  int const index = options.device >= 0 ? options.device : local_rank;
  if (index >= count) {
    char const* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    throw usage_error("rank " + std::to_string(local_rank) + " of this machine has no GPU of its own: CUDA sees " + std::to_string(count) +
                      (visible != nullptr ? " (CUDA_VISIBLE_DEVICES=" + std::string(visible) + ")" : std::string()) +
                      ". Remedy: as many ranks on a machine as it has GPUs");
  }
  at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  c10::cuda::set_device(device.index());
  return device;
}

/// Ranks on GPUs: one process a rank, one GPU a process.
class nccl_transport final : public stream_transport<cuda_streams> {
 public:
  nccl_transport(layout const& where, launched const& job, nccl_options const& options = {})
      : stream_transport<cuda_streams>(where, job.store, job.watch, job.join, gpu_of(job.local_rank, options)) {}
};

}  // namespace chevron
