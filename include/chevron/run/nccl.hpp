#pragma once

#include <cstdlib>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chevron/run/cuda_devices.hpp>
#include <chevron/run/cuda_streams.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/run/stream_transport.hpp>

/// \file
/// The transport between GPUs: NCCL.

namespace chevron {

struct nccl_options {
  int device = -1;  ///< the GPU of this rank, as CUDA numbers those it may see; -1: see `cuda_device_of`
};

namespace detail {

/// A GPU takes the work of its streams through a few queues, eight unless CUDA is told otherwise before it begins. Two streams in
/// one queue wait for each other: a rank's receive for its send, say, and the other rank's the other way round.
inline void keep_streams_apart() {
  constexpr char const* name = "CUDA_DEVICE_MAX_CONNECTIONS";
  ::setenv(name, "32", 0);
  char const* const value = std::getenv(name);
  if (std::atoi(value) >= 8) return;
  throw usage_error(std::string(name) + "=" + value +
                    " lets streams wait for each other, and ranks for ever. Remedy: unset it, or give 32");
}

}  // namespace detail

/// The GPU that a rank computes on, made this thread's current one. To be called before CUDA is used.
/// \throws usage_error without a usable GPU of that number
inline at::Device gpu_of(int local_rank, nccl_options const& options = {}) {
  detail::keep_streams_apart();
  int const index = options.device >= 0 ? options.device : cuda_device_of(local_rank, look_for_cuda_devices(), {.own_view = true});
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
