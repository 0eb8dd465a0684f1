#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/device/compute_streams.hpp>

/// \file
/// Streams of a GPU for computation, each of one rank.

namespace chevron::detail {

/// A stream on which no other rank of this process computes while `compute_lane::owner` lives; later ranks reuse the stream.
/// Streams are never destroyed: LibTorch's allocator keeps memory by the stream for which it was allocated.
///
/// LibTorch's pool hands out 32 streams of each priority in turn, so that later users share a stream: a kernel of one would get
/// into a graph that another captures.
inline compute_lane make_cuda_lane(at::Device where) {
  struct free_lanes {
    std::mutex mutex;
    std::map<c10::DeviceIndex, std::vector<cudaStream_t>> streams;  // by GPU
  };
  static free_lanes& free = *new free_lanes;  // never destroyed: ranks may end after static objects
  c10::cuda::CUDAGuard const here(where);
  c10::DeviceIndex const gpu = c10::cuda::current_device();
  cudaStream_t lane = nullptr;
  {
    std::lock_guard const hold(free.mutex);
    if (auto& mine = free.streams[gpu]; !mine.empty()) {
      lane = mine.back();
      mine.pop_back();
    }
  }
  if (lane == nullptr) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&lane, cudaStreamNonBlocking));
  return {c10::cuda::getStreamFromExternal(lane, gpu), std::shared_ptr<void>(lane, [gpu](void* of) {
            std::lock_guard const hold(free.mutex);
            free.streams[gpu].push_back(static_cast<cudaStream_t>(of));
          })};
}

}  // namespace chevron::detail
