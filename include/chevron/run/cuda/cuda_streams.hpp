#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/comm/streams/channel_use.hpp>
#include <chevron/run/cuda/cuda_devices.hpp>
#include <chevron/run/cuda/cuda_lanes.hpp>

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
/// Communicators block: a call comes back when its kernel is on its stream. One that does not block has NCCL start a thread for
/// each group of calls (NCCL 2.28, group.cc), and the host wait for that thread, at every message. A call that joins the other
/// ranks of a channel, or connects a way at its first use, waits for them; `abort`, from another thread, ends it. What NCCL finds
/// wrong, in a call or behind its back, is told by `fault`.
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

  /// \throws usage_error for settings under which ranks would hang
  explicit cuda_streams(at::Device on, nccl_channel_limits limits = {}) : device_(on), limits_(limits) {
    detail::refuse_settings_that_hang();
  }
  ~cuda_streams() {
    // A communicator that is not joined, or broken, can only be aborted: any other call may wait for ranks that never come.
    if (!stopped_ && !(fault().empty() && finalize_all())) abort();
    for (member const& m : members_) ncclCommDestroy(m.comm);
  }
  cuda_streams(cuda_streams const&) = delete;
  cuda_streams& operator=(cuda_streams const&) = delete;

  at::Device device() const { return device_; }

  stream make_stream() { return stream(device_); }
  event make_event() { return event(device_); }
  static compute_lane make_lane(at::Device where) { return detail::make_cuda_lane(where); }

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
  /// Joins the other ranks of a channel; NCCL connects a channel at its first use. `fault` names an error. Only `abort` ends the
  /// wait for a rank that never joins.
  template <class Stop>
  channel connect(std::string const& id, channel_use use, int rank, int size, Stop const&) {
    channel out;
    ncclUniqueId unique{};
    if (id.size() != sizeof unique.internal) {
      note("NCCL gave no id for a communicator");
      return out;
    }
    std::memcpy(unique.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    int const most = use == channel_use::edge ? limits_.edge : use == channel_use::sum ? limits_.sum : limits_.gather;
    if (most > 0) config.maxCTAs = most;
    member* made = nullptr;
    {
      std::lock_guard const hold(mutex_);
      if (stopped_) return out;
      made = &members_.emplace_back();
      ++inside_;
    }
    c10::cuda::CUDAGuard const here(device_);
    ncclResult_t const result = ncclCommInitRankConfig(&made->comm, size, unique, rank, &config);
    std::lock_guard const hold(mutex_);  // in one piece: `abort` ends members when no call is under way
    note_return(result, nullptr);
    made->joined = fault_.empty() && !stopped_;
    out.comm = made->comm;
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
    for (member const& m : members_) {
      ncclResult_t state = ncclSuccess;
      if (m.joined && ncclCommGetAsyncError(m.comm, &state) == ncclSuccess && bad(state)) fault_ = words_of(state, m.comm);
    }
    return fault_;
  }
  /// Ends all that is under way, for good: kernels, and calls that other threads are in.
  ///
  /// Within a group NCCL tells a communicator at once that it is to stop, and frees it at the group's end (2.22 and later,
  /// init.cc, `ncclCommAbort`). So all are told first, then calls that wait come back, then all are freed: freeing one waits for
  /// the whole device, where kernels of others may spin (pytorch/pytorch#119797).
  void abort() {
    std::lock_guard const one_at_a_time(aborting_);
    {
      std::lock_guard const hold(mutex_);
      stopped_ = true;
    }
    ncclGroupStart();
    while (true) {
      bool idle = false;
      {
        std::lock_guard const hold(mutex_);
        idle = inside_ == 0;
        for (member& m : members_) {
          // NCCL tells the communicator that it makes before it waits for the other ranks.
          ncclComm_t const made = std::atomic_ref(m.comm).load();
          if (made != nullptr && !std::exchange(m.told, true)) ncclCommAbort(made);
        }
      }
      if (idle) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    ncclGroupEnd();
    members_.clear();
  }
  /// A thread besides the rank's own begins to ask for events: else CUDA would take GPU 0 for it, and memory there.
  void enter_thread() { c10::cuda::set_device(device_.index()); }

 private:
  using clock = std::chrono::steady_clock;

  cudaStream_t current() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  static bool bad(ncclResult_t r) { return r != ncclSuccess; }
  static std::string words_of(ncclResult_t r, ncclComm_t comm) {
    if (r == ncclInProgress) return "NCCL: communicators do not block. Remedy: unset NCCL_COMM_BLOCKING";
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

  /// One group of NCCL calls.
  template <class Calls>
  void call(channel& c, Calls const& calls) {
    {
      std::lock_guard const hold(mutex_);
      if (stopped_ || !fault_.empty()) return;
      ++inside_;
    }
    // Without the mutex: where the call connects it takes long, and the watch must be able to look, and to abort, meanwhile.
    c10::cuda::CUDAGuard const here(device_);
    ncclGroupStart();
    ncclResult_t const asked = calls();
    ncclResult_t const end = ncclGroupEnd();
    std::lock_guard const hold(mutex_);
    note_return(bad(asked) ? asked : end, c.comm);
  }
  /// Counts a call of NCCL as over, and notes its error for the watch, unless `abort` caused it. The caller holds the mutex.
  void note_return(ncclResult_t result, ncclComm_t comm) {
    --inside_;
    if (bad(result) && !stopped_ && fault_.empty()) fault_ = words_of(result, comm);
  }

  /// Tells the other ranks that this one uses the channels no more; false where that takes too long or fails.
  bool finalize_all() {
    std::atomic<int> ended{0};  // 1: well, -1: not
    {
      std::lock_guard const hold(mutex_);
      ++inside_;
    }
    std::thread ending([&] {
      enter_thread();
      bool const well =
          std::all_of(members_.begin(), members_.end(), [](member const& m) { return ncclCommFinalize(m.comm) == ncclSuccess; });
      {
        std::lock_guard const hold(mutex_);
        --inside_;
      }
      ended = well ? 1 : -1;
    });
    auto const until = clock::now() + std::chrono::seconds(5);
    while (ended == 0 && clock::now() < until) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (ended == 0) abort();
    ending.join();
    return ended == 1;
  }

  void note(std::string what) {
    std::lock_guard const hold(mutex_);
    if (fault_.empty()) fault_ = std::move(what);
  }
  struct member {
    ncclComm_t comm = nullptr;
    bool joined = false;
    bool told = false;  // to stop
  };

  at::Device device_;
  nccl_channel_limits limits_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;  // of what the watch's thread looks at, too
  std::mutex aborting_;
  std::deque<member> members_;  // places stay: NCCL writes a communicator to its own while it joins
  int inside_ = 0;              // calls of NCCL that threads are in
  std::string fault_;
  std::map<void const*, std::pair<at::Tensor, at::Tensor>> staging_;  // by the host's memory: that of a gather on the device
};

}  // namespace chevron
