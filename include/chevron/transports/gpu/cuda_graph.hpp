#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/device_graph.hpp>
#include <chevron/run/core/device_threads.hpp>

/// \file
/// CUDA graphs of a rank's computation.

namespace chevron {

/// Captures graphs of one rank, on one GPU.
///
/// A capture belongs to its thread (`cudaStreamCaptureModeThreadLocal`): calls of CUDA by other threads, such as the stream
/// monitor's, NCCL's and other ranks' in this process, neither disturb the capture nor are captured. Work on the capture's
/// streams is captured from any thread: autograd computes a backward in a thread of the device.
///
/// Memory comes from a pool of LibTorch's allocator that the graphs of one `begin` share, and is released with the last of
/// these graphs. Random numbers cannot be drawn: LibTorch refuses, since its generator is not registered with the capture.
class cuda_graph_maker final : public graph_maker {
 public:
  std::string why_not(detail::compute_streams const& on) const override {
    return on.where().is_cuda() ? "" : "this rank computes on " + on.where().str() + ", not on a GPU";
  }

  /// Makes the memory pool of the next graphs, on the GPU of these streams. Releases the allocator's unused memory, unless
  /// several threads compute on GPUs.
  void begin(detail::compute_streams const& on) override {
    std::lock_guard const hold(one_at_a_time());
    pool_ = std::make_shared<pool>(on.where().index());
    // Graphs cannot use memory that the allocator caches for kernels outside of graphs. Releasing memory waits for all GPUs of
    // the process, and so for receives of rank threads whose messages this rank has not yet sent.
    if (!detail::device_thread::share(at::kCUDA)) c10::cuda::CUDACachingAllocator::emptyCache();
  }

  std::unique_ptr<device_graph> capture(detail::compute_streams const& on, std::function<void()> const& work) override {
    std::lock_guard const hold(one_at_a_time());
    c10::cuda::CUDAStream const lane(on.stream(0));
    recording now(pool_, lane);
    work();
    if (on.two()) join(lane, c10::cuda::CUDAStream(on.stream(1)));
    return std::make_unique<graph>(pool_, lane, now.end());
  }

 private:
  /// The id of a memory pool of LibTorch's allocator, which each capture uses until its graph is destroyed (`releasePool`).
  struct pool {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    /// \param on the pool's GPU
    explicit pool(c10::DeviceIndex on) : device(on), id(at::cuda::MemPool::graph_pool_handle(false)) {}
  };

  /// Locked by captures and by releases of memory: ranks of one process share LibTorch's allocator, which cannot release memory
  /// during a capture.
  static std::mutex& one_at_a_time() {
    static std::mutex of_process;
    return of_process;
  }

  /// Whether a stream is being captured; sets `id` to the id of the capture.
  static bool capturing(cudaStream_t stream, unsigned long long& id) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
    return status == cudaStreamCaptureStatusActive;
  }

  /// A capture, which the destructor gives up if the captured work throws.
  class recording {
   public:
    /// Begins a capture on a stream, with memory from a pool.
    recording(std::shared_ptr<pool> from, c10::cuda::CUDAStream on) : pool_(std::move(from)), stream_(on.stream()) {
      // Called before the capture begins: else the allocator would record an event into the capture for memory that another
      // thread frees (pytorch/pytorch#106235).
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
    /// Gives the capture up unless `end` was called.
    ~recording() {
      if (under_way_) give_up();
    }
    recording(recording const&) = delete;
    recording& operator=(recording const&) = delete;

    /// Ends the capture. \returns the graph, which the caller destroys \throws c10::Error if CUDA could not capture the work
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
        (void)cudaGetLastError();  // clears the error, which the next check would report
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
    /// Instantiates `noted`, a graph captured on a stream with memory from a pool, and destroys `noted`.
    graph(std::shared_ptr<pool> from, c10::cuda::CUDAStream on, cudaGraph_t noted) : pool_(std::move(from)), lane_(on) {
      cudaError_t const made = cudaGraphInstantiate(&ready_, noted, cudaGraphInstantiateFlagAutoFreeOnLaunch);
      C10_CUDA_CHECK_WARN(cudaGraphDestroy(noted));
      if (made == cudaSuccess) {
        // Uploading allocates memory; at the first launch, the allocation might wait for a receive that spins.
        C10_CUDA_CHECK_WARN(cudaGraphUpload(ready_, lane_.stream()));
        return;
      }
      c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
      C10_CUDA_CHECK(made);
    }
    /// Releases the graph's use of the pool. CUDA destroys a running graph after its end.
    ~graph() override {
      C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(ready_));
      c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);
    }
    /// Enqueues the graph on the stream of its capture.
    void launch() override { C10_CUDA_CHECK(cudaGraphLaunch(ready_, lane_.stream())); }

   private:
    std::shared_ptr<pool> pool_;
    c10::cuda::CUDAStream lane_;
    cudaGraphExec_t ready_ = nullptr;
  };

  /// Makes the main stream wait for the side stream's captured work, as a capture's end requires. A backward runs on its
  /// forward's stream, and so may leave captured work on the side stream.
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

/// Returns a graph maker for `trainer_options::graphs`; each rank needs one of its own:
/// `{.device = comm.device(), .graphs = chevron::cuda_graphs()}`.
inline std::shared_ptr<graph_maker> cuda_graphs() { return std::make_shared<cuda_graph_maker>(); }

}  // namespace chevron
