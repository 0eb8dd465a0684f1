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

#include <chevron/run/core/compute_streams.hpp>

/// \file
/// GPU streams for computation, each used by one rank.

namespace chevron::detail {

/// Returns a stream on which no other rank of this process computes while `compute_lane::owner` lives; later ranks reuse the
/// stream. Streams are never destroyed, since LibTorch's allocator caches memory by the stream for which it was allocated.
///
/// Streams of LibTorch's pool are not used: it hands out 32 streams per priority in turn, so two ranks could share a stream,
/// and a kernel of one rank would be captured into a graph of the other rank.
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
