#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/core/host_copy.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/cuda_lanes.hpp>
#include <chevron/transports/streams/stream_fault.hpp>

/// \file
/// Streams and events of a GPU, without channels: the base of `cuda_streams` and `copy_streams`.

namespace chevron::detail {

/// The streams of one rank on one GPU. The rank computes on its thread's current stream.
class gpu_streams {
 public:
  class stream {
   public:
    stream() = default;
    explicit stream(at::Device on) {
      c10::cuda::CUDAGuard const here(on);
      int least = 0, greatest = 0;
      C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      cudaStream_t made = nullptr;
      // A higher priority than computation: transfers are short, and other ranks wait for them.
      C10_CUDA_CHECK(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
      handle_ = {made, [](cudaStream_t s) { C10_CUDA_CHECK_WARN(cudaStreamDestroy(s)); }};
    }
    cudaStream_t get() const { return handle_.get(); }

   private:
    std::shared_ptr<CUstream_st> handle_;
  };

  class event {
   public:
    event() = default;
    explicit event(at::Device on) {
      c10::cuda::CUDAGuard const here(on);
      cudaEvent_t made = nullptr;
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
      handle_ = {made, [](cudaEvent_t e) { C10_CUDA_CHECK_WARN(cudaEventDestroy(e)); }};
    }
    cudaEvent_t get() const { return handle_.get(); }

   private:
    std::shared_ptr<CUevent_st> handle_;
  };

  gpu_streams(gpu_streams const&) = delete;
  gpu_streams& operator=(gpu_streams const&) = delete;

  at::Device device() const { return device_; }

  stream make_stream() { return stream(device_); }
  event make_event() { return event(device_); }
  static compute_lane make_lane(at::Device where) { return detail::make_cuda_lane(where); }

  void record(event& e) {
    c10::cuda::CUDAGuard const here(device_);  // the default stream's handle is null: the current GPU's default stream
    C10_CUDA_CHECK(cudaEventRecord(e.get(), current()));
  }
  void record(event& e, stream& on) { C10_CUDA_CHECK(cudaEventRecord(e.get(), on.get())); }
  void wait(stream& on, event const& e) { C10_CUDA_CHECK(cudaStreamWaitEvent(on.get(), e.get(), 0)); }
  template <class Stop>
  bool wait(event const& e, Stop const&) {
    c10::cuda::CUDAGuard const here(device_);
    C10_CUDA_CHECK(cudaStreamWaitEvent(current(), e.get(), 0));
    return true;
  }
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    for (poll_pause const pause; !passed(e); pause()) {
      if (stopped_ || stop()) return false;
    }
    return true;
  }
  bool passed(event const& e) {
    cudaError_t const state = cudaEventQuery(e.get());
    if (state == cudaSuccess) return is_sound();
    static_cast<void>(cudaGetLastError());
    // The device is lost: the stream monitor reads `fault`, and ends this rank's waits.
    if (state != cudaErrorNotReady) note({.what = "GPU", .text = std::string("CUDA: ") + cudaGetErrorString(state)});
    return false;
  }
  at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true)); }

  /// Makes the rank's GPU current in another thread of the rank, which queries events: else CUDA would use GPU 0, and memory of
  /// GPU 0, for that thread.
  void enter_thread() { c10::cuda::set_device(device_.index()); }

 protected:
  using clock = std::chrono::steady_clock;

  /// \throws usage_error for settings under which ranks would hang
  explicit gpu_streams(at::Device on) : device_(on) { detail::refuse_settings_that_hang(); }
  ~gpu_streams() = default;

  /// Whether the work before a passed event has its real results: false if waits were ended early.
  virtual bool is_sound() { return true; }

  cudaStream_t current() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  /// Stores the first fault; ignores later ones.
  void note(stream_fault found) {
    std::lock_guard const hold(mutex_);
    if (!fault_) fault_ = std::move(found);
  }

  at::Device device_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;  // guards members that the stream monitor's thread reads, too
  int inside_ = 0;    // calls under way, of all threads
  stream_fault fault_;
};

}  // namespace chevron::detail
