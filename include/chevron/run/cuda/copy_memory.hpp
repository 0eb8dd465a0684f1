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
#include <chevron/run/cuda/copy_page.hpp>

/// \file
/// Memory of a GPU that all ranks of a channel of copies reach.

namespace chevron::detail {

/// This rank's memory, and that of the others as this rank reaches it: between processes by handles (CUDA IPC), between threads
/// of one by address. A handle is of a whole allocation, so the memory comes from `cudaMalloc`, not from LibTorch's allocator.
class copy_memory {
 public:
  explicit copy_memory(std::shared_ptr<copy_page> page) : page_(std::move(page)) {}
  /// The others' memory is left, and this rank's is freed when all others have left it: as long as they are there their streams
  /// may write to it.
  ~copy_memory() {
    for (void* const opened : opened_) C10_CUDA_CHECK_WARN(cudaIpcCloseMemHandle(opened));
    page_->mine().left = 1;
    std::lock_guard const hold(lent().mutex);
    if (own_ != nullptr) lent().all.push_back({own_, std::move(page_)});
    free_what_nobody_reaches();
  }
  copy_memory(copy_memory const&) = delete;
  copy_memory& operator=(copy_memory const&) = delete;

  /// Makes memory of the current GPU and tells the others; `tell` before or with it.
  void lend(std::size_t bytes) {
    C10_CUDA_CHECK(cudaMalloc(&own_, bytes));
    copy_entry& mine = page_->mine();
    mine.memory = reinterpret_cast<std::uint64_t>(own_);
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&mine.handle, own_));
  }
  std::byte* own() const { return static_cast<std::byte*>(own_); }

  /// Another rank's, which is ready, for the current GPU.
  /// \throws usage_error where this GPU cannot reach it
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
    static auto* const one = new lent_by_process;  // CUDA may be gone before objects of the process are
    return *one;
  }

  /// The caller holds the mutex. A rank that is not ready looks, once it is, whether this one has left.
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
