#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <chevron/run/core/error.hpp>
#include <chevron/transports/gpu/copy_page.hpp>

/// \file
/// GPU memory that all ranks of a copy channel can access.

namespace chevron::detail {

/// This rank's memory, and the other ranks' memory, mapped into this process: memory of other processes by handles (CUDA IPC),
/// memory of rank threads of this process by address. A handle covers a whole allocation, so the memory comes from
/// `cudaMalloc`, not from LibTorch's allocator.
class copy_memory {
 public:
  explicit copy_memory(std::shared_ptr<copy_page> page) : page_(std::move(page)) {}
  /// Closes the other ranks' memory. This rank's memory is freed by the first `copy_memory` of the process that is destroyed
  /// after all other ranks have left, since their streams may write to the memory until then.
  ~copy_memory() {
    for (void* const opened : opened_) C10_CUDA_CHECK_WARN(cudaIpcCloseMemHandle(opened));
    page_->mine().left = 1;
    std::lock_guard const hold(lent().mutex);
    if (own_ != nullptr) lent().all.push_back({own_, std::move(page_)});
    free_what_nobody_reaches();
  }
  copy_memory(copy_memory const&) = delete;
  copy_memory& operator=(copy_memory const&) = delete;

  /// Allocates memory of the current GPU, and writes its address and handle to this rank's `copy_entry`, before `ready` is set.
  void lend(std::size_t bytes) {
    C10_CUDA_CHECK(cudaMalloc(&own_, bytes));
    copy_entry& mine = page_->mine();
    mine.memory = reinterpret_cast<std::uint64_t>(own_);
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&mine.handle, own_));
  }
  std::byte* own() const { return static_cast<std::byte*>(own_); }

  /// Returns the address of another rank's memory for the current GPU. \param rank a rank that is ready \param device the
  /// current GPU
  /// \throws usage_error if this GPU cannot reach the memory
  std::byte* reach(int rank, at::Device device) {
    copy_entry const& theirs = page_->of(rank);
    if (copy_page::process() != theirs.process.data()) {
      void* out = nullptr;
      cudaError_t const result = cudaIpcOpenMemHandle(&out, theirs.handle, cudaIpcMemLazyEnablePeerAccess);
      if (result != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        refuse(rank, device, std::string("another process's, cudaIpcOpenMemHandle: ") + cudaGetErrorString(result));
      }
      opened_.push_back(out);
      return static_cast<std::byte*>(out);
    }
    if (theirs.device != device.index()) {
      int can = 0;
      C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device.index(), theirs.device));
      if (can == 0) refuse(rank, device, "cudaDeviceCanAccessPeer says no");
      cudaError_t const result = cudaDeviceEnablePeerAccess(theirs.device, 0);
      if (result != cudaErrorPeerAccessAlreadyEnabled) C10_CUDA_CHECK(result);
      static_cast<void>(cudaGetLastError());
    }
    return reinterpret_cast<std::byte*>(theirs.memory);
  }

 private:
  struct lent_memory {
    void* memory;
    std::shared_ptr<copy_page> page;
  };
  struct lent_by_process {
    std::mutex mutex;
    std::list<lent_memory> all;
  };
  static lent_by_process& lent() {
    static auto* const one = new lent_by_process;  // never destroyed: CUDA may end before static objects do
    return *one;
  }

  /// Frees the memory of channels that all ready ranks have left. The caller must hold the mutex. A rank that becomes ready
  /// later finds `left` set, and does not access the memory (`copy_channel::reach`).
  static void free_what_nobody_reaches() {
    std::erase_if(lent().all, [](lent_memory const& each) {
      for (int r = 0; r < each.page->size(); ++r) {
        if (each.page->of(r).ready != 0 && each.page->of(r).left == 0) return false;
      }
      C10_CUDA_CHECK_WARN(cudaFree(each.memory));
      return true;
    });
  }

  [[noreturn]] void refuse(int rank, at::Device device, std::string const& why) const {
    throw usage_error("GPU " + std::to_string(device.index()) + " cannot reach the memory of GPU " +
                      std::to_string(page_->of(rank).device) + ", rank " + std::to_string(rank) + " of a channel of copies (" +
                      why + "). Remedy: GPUs that nvidia-smi topo -p2p r shows as OK, or nccl_transport, --backend nccl");
  }

  std::shared_ptr<copy_page> page_;
  void* own_ = nullptr;
  std::vector<void*> opened_;
};

}  // namespace chevron::detail
