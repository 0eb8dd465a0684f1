#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/device/device_threads.hpp>

/// \file
/// CUDA graphs of what a rank computes.

namespace chevron {

/// Graphs of one rank, on one GPU.
///
/// A capture belongs to its thread (`cudaStreamCaptureModeThreadLocal`): what other threads ask CUDA for meanwhile, as the watch
/// of streams, NCCL's own threads and other ranks in this process do, neither disturbs it nor gets into it. What runs on the
/// streams of the capture does get into it, from whichever thread: autograd computes a backward in a thread of the device.
///
/// Memory comes from a pool of LibTorch's allocator that belongs to the graphs of one `begin`, and goes back when the last of
/// them is gone. Random numbers cannot be drawn: LibTorch refuses, since its generator does not know of the capture.
class cuda_graph_maker final : public graph_maker {
 public:
  std::string why_not(compute_streams const& on) const override {
    return on.where().is_cuda() ? "" : "this rank computes on " + on.where().str() + ", not on a GPU";
  }

  void begin(compute_streams const& on) override {
    std::lock_guard const hold(one_at_a_time());
    pool_ = std::make_shared<pool>(on.where().index());
    // Memory that the allocator keeps for kernels that run one by one is of no use to graphs. Giving it back waits for all GPUs
    // of the process: for messages, too, that ranks which are other threads wait for, and that this rank has not yet sent.
    if (!device_thread::share(at::kCUDA)) c10::cuda::CUDACachingAllocator::emptyCache();
  }

  std::unique_ptr<device_graph> capture(compute_streams const& on, std::function<void()> const& work) override {
    std::lock_guard const hold(one_at_a_time());
    c10::cuda::CUDAStream const lane(on.stream(0));
    recording now(pool_, lane);
    work();
    if (on.two()) join(lane, c10::cuda::CUDAStream(on.stream(1)));
    return std::make_unique<graph>(pool_, lane, now.end());
  }

 private:
  /// A use of it is begun and ended with each capture; it lives until all of them have been given up.
  struct pool {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    explicit pool(c10::DeviceIndex on) : device(on), id(at::cuda::MemPool::graph_pool_handle(false)) {}
  };

  /// Ranks of one process share LibTorch's allocator, which cannot give memory back while something is captured.
  static std::mutex& one_at_a_time() {
    static std::mutex of_process;
    return of_process;
  }

  static bool capturing(cudaStream_t stream, unsigned long long& id) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
    return status == cudaStreamCaptureStatusActive;
  }

  /// A capture that ends itself where `work` throws.
  class recording {
   public:
    recording(std::shared_ptr<pool> from, c10::cuda::CUDAStream on) : pool_(std::move(from)), stream_(on.stream()) {
      // The allocator first: memory that another thread frees within a capture it knows nothing of would have an event recorded
      // into that capture (pytorch/pytorch#106235).
      auto const mine = std::make_shared<std::atomic<unsigned long long>>(0);
      c10::cuda::CUDACachingAllocator::beginAllocateToPool(pool_->device, pool_->id, [mine](cudaStream_t asks) {
        unsigned long long id = 0;
        return *mine != 0 && capturing(asks, id) && id == *mine;
      });
      allocating_ = true;
      try {
        C10_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        under_way_ = true;
        unsigned long long id = 0;
        capturing(stream_, id);
        *mine = id;
      } catch (...) {
        give_up();
        throw;
      }
    }
    ~recording() {
      if (under_way_) give_up();
    }
    recording(recording const&) = delete;
    recording& operator=(recording const&) = delete;

    /// \throws what CUDA would not note
    cudaGraph_t end() {
      cudaGraph_t noted = stop();
      if (noted == nullptr) {
        c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
        C10_CUDA_CHECK(why_);
      }
      return noted;
    }

   private:
    void give_up() {
      if (cudaGraph_t const noted = stop()) C10_CUDA_CHECK_WARN(cudaGraphDestroy(noted));
      if (allocating_) c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
    }
    cudaGraph_t stop() {
      cudaGraph_t noted = nullptr;
      if (std::exchange(under_way_, false)) why_ = cudaStreamEndCapture(stream_, &noted);
      if (why_ != cudaSuccess) {
        (void)cudaGetLastError();  // else whatever asks next would report it
        noted = nullptr;
      } else if (noted == nullptr) {
        why_ = cudaErrorStreamCaptureInvalidated;
      }
      if (allocating_) c10::cuda::CUDACachingAllocator::endAllocateToPool(pool_->device, pool_->id);
      return noted;
    }

    std::shared_ptr<pool> pool_;
    cudaStream_t stream_;
    bool under_way_ = false, allocating_ = false;
    cudaError_t why_ = cudaSuccess;
  };

  class graph final : public device_graph {
   public:
    graph(std::shared_ptr<pool> from, c10::cuda::CUDAStream on, cudaGraph_t noted) : pool_(std::move(from)), lane_(on) {
      cudaError_t const made = cudaGraphInstantiate(&ready_, noted, cudaGraphInstantiateFlagAutoFreeOnLaunch);
      C10_CUDA_CHECK_WARN(cudaGraphDestroy(noted));
      if (made == cudaSuccess) {
        // So that the first launch has nothing to allocate, which may have to wait for a receive that spins.
        C10_CUDA_CHECK_WARN(cudaGraphUpload(ready_, lane_.stream()));
        return;
      }
      c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
      C10_CUDA_CHECK(made);
    }
    ~graph() override {
      // One that is running is destroyed when it has ended.
      C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(ready_));
      c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
    }
    void launch() override { C10_CUDA_CHECK(cudaGraphLaunch(ready_, lane_.stream())); }

   private:
    std::shared_ptr<pool> pool_;
    c10::cuda::CUDAStream lane_;
    cudaGraphExec_t ready_ = nullptr;
  };

  /// A backward runs on the lane of its forward, which may be the other one: what it left there comes to an end here.
  static void join(c10::cuda::CUDAStream const& lane, c10::cuda::CUDAStream const& other) {
    unsigned long long here = 0, there = 0;
    if (!capturing(lane.stream(), here) || !capturing(other.stream(), there) || here != there) return;
    cudaEvent_t end = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    cudaError_t noted = cudaEventRecord(end, other.stream());
    if (noted == cudaSuccess) noted = cudaStreamWaitEvent(lane.stream(), end, 0);
    C10_CUDA_CHECK_WARN(cudaEventDestroy(end));
    C10_CUDA_CHECK(noted);
  }

  std::shared_ptr<pool> pool_;
};

/// For `trainer_options::graphs`: `{.device = comm.device(), .graphs = chevron::cuda_graphs()}`. One for each rank.
inline std::shared_ptr<graph_maker> cuda_graphs() { return std::make_shared<cuda_graph_maker>(); }

}  // namespace chevron
