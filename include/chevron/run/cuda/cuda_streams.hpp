#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/comm/streams/channel_use.hpp>

/// \file
/// Streams and events of a GPU, and NCCL's communicators as channels.

namespace chevron {

/// Blocks of a communicator's kernels, by what it is for: a transfer that waits keeps so many of the GPU's processors from
/// computing, and takes memory for each. 0: NCCL's own choice.
struct nccl_channel_limits {
  int edge = 4;
  int sum = 16;
  int gather = 1;
};

/// What `stream_transport` asks for, as host_streams.hpp documents it, on one GPU. What the rank computes is what it puts on its
/// thread's current stream.
///
/// Communicators are made not to block: joining the other ranks ends when `stop` says so, and any call ends when `abort` was
/// called. What NCCL finds wrong, in a call or behind its back, is told by `fault`.
class cuda_streams {
 public:
  class stream {
   public:
    stream() = default;
    explicit stream(at::Device on) {
      c10::cuda::CUDAGuard const here(on);
      int least = 0, greatest = 0;
      C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      cudaStream_t made = nullptr;
      // Above computation: a transfer is short, and another rank waits for it.
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

  class channel {
    friend cuda_streams;
    ncclComm_t comm = nullptr;
  };

  explicit cuda_streams(at::Device on, nccl_channel_limits limits = {}) : device_(on), limits_(limits) {}
  ~cuda_streams() {
    // A communicator that is not joined, or broken, can only be aborted: any other call may wait for ranks that never come.
    if (!stopped_ && !(all_settled() && finalize_all())) abort();
    for (ncclComm_t const comm : comms_) ncclCommDestroy(comm);
  }
  cuda_streams(cuda_streams const&) = delete;
  cuda_streams& operator=(cuda_streams const&) = delete;

  at::Device device() const { return device_; }

  stream make_stream() { return stream(device_); }
  event make_event() { return event(device_); }

  void record(event& e) { C10_CUDA_CHECK(cudaEventRecord(e.get(), current())); }
  void record(event& e, stream& on) { C10_CUDA_CHECK(cudaEventRecord(e.get(), on.get())); }
  void wait(stream& on, event const& e) { C10_CUDA_CHECK(cudaStreamWaitEvent(on.get(), e.get(), 0)); }
  template <class Stop>
  bool wait(event const& e, Stop const&) {
    C10_CUDA_CHECK(cudaStreamWaitEvent(current(), e.get(), 0));
    return true;
  }
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    auto const begun = clock::now();
    while (!passed(e)) {
      if (stopped_ || stop()) return false;
      // The end is mostly near; a rank that waits long leaves the core to others.
      clock::now() - begun < std::chrono::microseconds(200) ? std::this_thread::yield()
                                                            : std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }
  bool passed(event const& e) {
    cudaError_t const state = cudaEventQuery(e.get());
    if (state == cudaSuccess) return true;
    static_cast<void>(cudaGetLastError());
    // The device is lost. Whoever waits here is ended by the watch, to which `fault` tells it.
    if (state != cudaErrorNotReady) note(std::string("CUDA: ") + cudaGetErrorString(state));
    return false;
  }

  static std::string make_id() {
    ncclUniqueId id{};
    ncclResult_t const result = ncclGetUniqueId(&id);
    return result == ncclSuccess ? std::string(id.internal, sizeof id.internal) : std::string();
  }
  /// Joins the other ranks of a channel. Others may be connected only at their first use. If `stop()` becomes true first, or it
  /// cannot be done, `fault` says so.
  template <class Stop>
  channel connect(std::string const& id, channel_use use, int rank, int size, Stop const& stop) {
    channel out;
    ncclUniqueId unique{};
    if (id.size() != sizeof unique.internal) {
      note("NCCL gave no id for a communicator");
      return out;
    }
    std::memcpy(unique.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    int const most = use == channel_use::edge ? limits_.edge : use == channel_use::sum ? limits_.sum : limits_.gather;
    if (most > 0) config.maxCTAs = most;
    c10::cuda::CUDAGuard const here(device_);
    ncclResult_t const result = ncclCommInitRankConfig(&out.comm, size, unique, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) {
      note(result, nullptr);
      return out;
    }
    {
      std::lock_guard const hold(mutex_);
      comms_.push_back(out.comm);
    }
    settle(out.comm, stop);
    return out;
  }

  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    call(c, [&] {
      for (at::Tensor const& value : values) {
        if (auto const r = ncclSend(value.const_data_ptr(), value.nbytes(), ncclInt8, 1, c.comm, on.get()); bad(r)) return r;
      }
      return ncclSuccess;
    });
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    call(c, [&] {
      for (at::Tensor const& value : into) {
        if (auto const r = ncclRecv(value.mutable_data_ptr(), value.nbytes(), ncclInt8, 0, c.comm, on.get()); bad(r)) return r;
      }
      return ncclSuccess;
    });
  }
  void sum(channel& c, stream& on, at::Tensor const& values) {
    ncclDataType_t const type = type_of(values);  // may throw, which no group of NCCL's survives
    call(c, [&] {
      void* const at = values.mutable_data_ptr();
      return ncclAllReduce(at, at, static_cast<std::size_t>(values.numel()), type, ncclSum, c.comm, on.get());
    });
  }
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    c10::cuda::CUDAGuard const here(device_);
    auto& [own, everybody] = staging_[mine.const_data_ptr()];
    if (!own.defined() || own.numel() != mine.numel()) {
      c10::cuda::CUDAStreamGuard const there(c10::cuda::getStreamFromExternal(on.get(), device_.index()));
      own = at::empty(mine.sizes(), mine.options().device(device_).pinned_memory(false));
      everybody = at::empty(all.sizes(), own.options());
    }
    C10_CUDA_CHECK(
        cudaMemcpyAsync(own.mutable_data_ptr(), mine.const_data_ptr(), mine.nbytes(), cudaMemcpyHostToDevice, on.get()));
    call(c, [&, &sent = own, &came = everybody] {
      return ncclAllGather(sent.const_data_ptr(), came.mutable_data_ptr(), sent.nbytes(), ncclInt8, c.comm, on.get());
    });
    C10_CUDA_CHECK(
        cudaMemcpyAsync(all.mutable_data_ptr(), everybody.const_data_ptr(), all.nbytes(), cudaMemcpyDeviceToHost, on.get()));
  }
  at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true)); }

  std::string fault() {
    std::lock_guard const hold(mutex_);
    if (!fault_.empty() || stopped_) return fault_;
    for (ncclComm_t const comm : comms_) {
      ncclResult_t state = ncclSuccess;
      if (ncclCommGetAsyncError(comm, &state) == ncclSuccess && bad(state)) fault_ = words_of(state, comm);
    }
    return fault_;
  }
  void abort() {
    stopped_ = true;
    // Whoever is within a call sees it and leaves.
    std::lock_guard const hold(mutex_);
    // In a group NCCL sets the flags of all communicators before it clears any away (from 2.22 on). Alone, one's clearing waits
    // for the whole device, where kernels of the others spin for ever (pytorch/pytorch#119797).
    ncclGroupStart();
    for (ncclComm_t const comm : std::exchange(comms_, {})) ncclCommAbort(comm);
    ncclGroupEnd();
  }
  /// A thread besides the rank's own begins to ask for events: else CUDA would take GPU 0 for it, and memory there.
  void enter_thread() { c10::cuda::set_device(device_.index()); }

 private:
  using clock = std::chrono::steady_clock;

  cudaStream_t current() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  static bool bad(ncclResult_t r) { return r != ncclSuccess && r != ncclInProgress; }
  static std::string words_of(ncclResult_t r, ncclComm_t comm) {
    std::string out = std::string("NCCL: ") + ncclGetErrorString(r);
    char const* const more = comm != nullptr ? ncclGetLastError(comm) : nullptr;
    return more != nullptr && *more != '\0' ? out + ", " + more : out;
  }
  static ncclDataType_t type_of(at::Tensor const& values) {
    switch (values.scalar_type()) {
      case at::kFloat:
        return ncclFloat32;
      case at::kDouble:
        return ncclFloat64;
      case at::kHalf:
        return ncclFloat16;
      case at::kBFloat16:
        return ncclBfloat16;
      case at::kByte:
        return ncclUint8;
      default:
        TORCH_CHECK(false, "gradients of type ", values.scalar_type(), " cannot be summed over replicas");
    }
  }

  /// One group of NCCL calls. What goes wrong is noted, and the watch tells everybody.
  template <class Calls>
  void call(channel& c, Calls const& calls) {
    ncclResult_t result = ncclSuccess;
    {
      std::lock_guard const hold(mutex_);
      if (stopped_ || !fault_.empty()) return;
      c10::cuda::CUDAGuard const here(device_);
      ncclGroupStart();
      result = calls();
      ncclResult_t const end = ncclGroupEnd();
      if (!bad(result)) result = end;
      if (bad(result)) fault_ = words_of(result, c.comm);
    }
    // Where the call connects it takes long, and the watch must be able to look, and to abort, meanwhile.
    if (result == ncclInProgress)
      settle(
          c.comm, [] { return false; }, std::chrono::microseconds(0));
  }

  bool all_settled() {
    std::lock_guard const hold(mutex_);
    return std::all_of(comms_.begin(), comms_.end(), [](ncclComm_t comm) {
      ncclResult_t state = ncclInProgress;
      return ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclSuccess;
    });
  }

  bool finalize_all() {
    for (ncclComm_t const comm : comms_) ncclCommFinalize(comm);
    auto const until = clock::now() + std::chrono::seconds(5);
    return std::all_of(comms_.begin(), comms_.end(),
                       [&](ncclComm_t comm) { return settle(comm, [&] { return clock::now() > until; }); });
  }

  /// Waits until what a communicator was asked to do in the background is done; false if not.
  /// \param nap between two looks; 0: the thread only gives way
  template <class Stop>
  bool settle(ncclComm_t comm, Stop const& stop, std::chrono::microseconds nap = std::chrono::microseconds(100)) {
    while (true) {
      ncclResult_t state = ncclInProgress;
      {
        // One thread at a time: the one that finds a background job ended joins its thread and frees it. And none after `abort`.
        std::lock_guard const hold(mutex_);
        if (stopped_) return false;
        if (ncclResult_t const asked = ncclCommGetAsyncError(comm, &state); asked != ncclSuccess) state = asked;
        if (bad(state) && fault_.empty()) fault_ = words_of(state, comm);
      }
      if (state != ncclInProgress) return state == ncclSuccess;
      if (stop()) return false;
      nap.count() > 0 ? std::this_thread::sleep_for(nap) : std::this_thread::yield();
    }
  }

  void note(std::string what) {
    std::lock_guard const hold(mutex_);
    if (fault_.empty()) fault_ = std::move(what);
  }
  void note(ncclResult_t r, ncclComm_t comm) { note(words_of(r, comm)); }

  at::Device device_;
  nccl_channel_limits limits_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;  // of what the watch's thread looks at, too
  std::vector<ncclComm_t> comms_;
  std::string fault_;
  std::map<void const*, std::pair<at::Tensor, at::Tensor>> staging_;  // by the host's memory: that of a gather on the device
};

}  // namespace chevron
