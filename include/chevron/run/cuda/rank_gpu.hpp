#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>

#include <chevron/run/cuda/cuda_devices.hpp>

/// \file
/// The GPU of a rank, for transports.

namespace chevron::detail {

/// The GPU on which a rank computes, made this thread's current one.
/// \param local_rank `job::local_rank` \param given the GPU's number, as CUDA numbers visible ones; -1: by `local_rank`
/// \throws usage_error without a usable GPU of that number, and for settings under which ranks would hang
inline at::Device rank_gpu(int local_rank, int given, cuda_sharing const& how) {
  refuse_settings_that_hang();
  int const index = given >= 0 ? given : cuda_device_of(local_rank, look_for_cuda_devices(), how);
  at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  c10::cuda::set_device(device.index());
  return device;
}

}  // namespace chevron::detail
