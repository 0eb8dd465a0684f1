#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
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

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/transports/gpu/gpu_streams.hpp>

/// \file
/// NCCL's communicators as channels between the streams of GPUs.

namespace chevron {

/// The largest number of blocks of a communicator's kernels, by the communicator's use. While a transfer waits, each of its
/// blocks occupies a multiprocessor, and memory. 0: NCCL chooses.
struct nccl_channel_limits {
  int edge = 4;
  int sum = 16;
  int gather = 1;
};

/// The `Streams` of a `stream_transport` (tests/support/host_streams.hpp documents the members) on one GPU. Channels are NCCL's
/// communicators.
///
/// Communicators are blocking: a call returns when its kernel is on its stream. For a non-blocking communicator NCCL would
/// start a thread for each group of calls (NCCL 2.28, group.cc), and the host would wait for that thread at every message. A
/// call that joins a channel, or connects a channel at its first use, waits for the other ranks; `abort`, from another thread,
/// ends the wait. `fault` reports errors of calls, as faults of this rank, and asynchronous errors. Of both, ncclRemoteError is
/// the loss of a peer ("possibly due to a network error or a remote process exiting prematurely", NCCL user guide, ncclResult_t).
class cuda_streams final : public detail::gpu_streams {
  /// A communicator.
  struct member {
    ncclComm_t comm = nullptr;
    std::string name;
    int peer = -1;  // global rank of the other end; -1: there are several
    bool joined = false;
    bool told = false;  // `ncclCommAbort` was called
  };

 public:
  class channel {
    friend cuda_streams;
    member const* of = nullptr;
  };

  explicit cuda_streams(at::Device on, nccl_channel_limits limits = {}) : gpu_streams(on), limits_(limits) {}
  ~cuda_streams() {
    // A communicator that is broken, or not joined, can only be aborted: any other call may wait for ranks that never answer.
    if (!stopped_ && (fault() || !finalize_all())) abort();
    for (member const& m : members_) ncclCommDestroy(m.comm);
  }

  /// Makes the id of a new channel, for all of its ranks. `fault` reports errors.
  std::string make_id() {
    ncclUniqueId id{};
    if (ncclResult_t const result = ncclGetUniqueId(&id); bad(result))
      note({.what = "call of ncclGetUniqueId", .text = text_of(result, nullptr)});
    return {id.internal, sizeof id.internal};
  }
  /// Joins the other ranks of a channel; NCCL connects a channel at its first use. `fault` reports errors. Only `abort` ends
  /// the wait for a rank that never joins. \param name the channel's name, which NCCL's messages and profilers show
  /// \param peer global rank of the other end; -1 if there are several
  template <class Stop>
  channel connect(std::string const& name, std::string const& id, channel_use use, int rank, int size, int peer, Stop const&) {
    channel out;
    ncclUniqueId unique{};
    std::memcpy(unique.internal, id.data(), std::min(id.size(), sizeof unique.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    int const most = use == channel_use::edge ? limits_.edge : use == channel_use::sum ? limits_.sum : limits_.gather;
    if (most > 0) config.maxCTAs = most;
    member* made = nullptr;
    {
      std::lock_guard const hold(mutex_);
      if (stopped_) return out;
      made = &members_.emplace_back();
      made->name = name;
      made->peer = peer;
      ++inside_;
    }
    give_name(config, made->name.c_str());
    c10::cuda::CUDAGuard const here(device_);
    ncclResult_t const result = ncclCommInitRankConfig(&made->comm, size, unique, rank, &config);
    std::lock_guard const hold(mutex_);  // held to the end: `abort` frees members once no call is under way
    note_return(result, "ncclCommInitRankConfig", *made, false);
    made->joined = !fault_ && !stopped_;
    out.of = made;
    return out;
  }

  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    call(c, "ncclSend", [&](ncclComm_t comm) {
      for (at::Tensor const& value : values) {
        if (auto const r = ncclSend(value.const_data_ptr(), value.nbytes(), ncclInt8, 1, comm, on.get()); bad(r)) return r;
      }
      return ncclSuccess;
    });
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    call(c, "ncclRecv", [&](ncclComm_t comm) {
      for (at::Tensor const& value : into) {
        if (auto const r = ncclRecv(value.mutable_data_ptr(), value.nbytes(), ncclInt8, 0, comm, on.get()); bad(r)) return r;
      }
      return ncclSuccess;
    });
  }
  void sum(channel& c, stream& on, at::Tensor const& values) {
    ncclDataType_t const type = type_of(values);  // may throw, which must not happen within a group of NCCL calls
    call(c, "ncclAllReduce", [&](ncclComm_t comm) {
      void* const at = values.mutable_data_ptr();
      return ncclAllReduce(at, at, static_cast<std::size_t>(values.numel()), type, ncclSum, comm, on.get());
    });
  }
  /// Sums each share on its own rank only: elements [cut[r], cut[r + 1]) are the share of rank r. NCCL's order of additions
  /// differs from that of `sum`.
  void reduce_scatter(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    ncclDataType_t const type = type_of(values);
    by_shares(c, "ncclReduce", values, cut, [&](ncclComm_t comm, void* at, std::size_t numbers, int rank) {
      return ncclReduce(at, at, numbers, type, ncclSum, rank, comm, on.get());
    });
  }
  /// Copies every rank's share to all ranks, as bytes.
  void share_gather(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    by_shares(c, "ncclBroadcast", values, cut, [&](ncclComm_t comm, void* at, std::size_t numbers, int rank) {
      return ncclBroadcast(at, at, numbers * values.itemsize(), ncclInt8, rank, comm, on.get());
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
    call(c, "ncclAllGather", [&, &sent = own, &came = everybody](ncclComm_t comm) {
      return ncclAllGather(sent.const_data_ptr(), came.mutable_data_ptr(), sent.nbytes(), ncclInt8, comm, on.get());
    });
    C10_CUDA_CHECK(
        cudaMemcpyAsync(all.mutable_data_ptr(), everybody.const_data_ptr(), all.nbytes(), cudaMemcpyDeviceToHost, on.get()));
  }

  detail::stream_fault fault() {
    std::lock_guard const hold(mutex_);
    if (fault_ || stopped_) return fault_;
    for (member const& m : members_) {
      ncclResult_t state = ncclSuccess;
      if (m.joined && ncclCommGetAsyncError(m.comm, &state) == ncclSuccess && bad(state)) {
        fault_ = fault_of(state, "operation", m);
        break;
      }
    }
    return fault_;
  }
  /// Ends all operations for good: kernels, and calls of other threads.
  ///
  /// Within a group `ncclCommAbort` stops a communicator at once, and frees the communicator at the group's end (NCCL 2.22 and
  /// later, init.cc). So first all communicators are stopped, then waiting calls return, then all communicators are freed:
  /// freeing a communicator waits for the whole device, on which kernels of other communicators may spin
  /// (pytorch/pytorch#119797).
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
          // NCCL stores a new communicator's handle before it waits for the other ranks.
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

 private:
  static bool bad(ncclResult_t r) { return r != ncclSuccess; }
  static std::string text_of(ncclResult_t r, ncclComm_t comm) {
    if (r == ncclInProgress) return "NCCL: communicators do not block. Remedy: unset NCCL_COMM_BLOCKING";
    std::string out = std::string("NCCL: ") + ncclGetErrorString(r);
    char const* const more = ncclGetLastError(comm);  // of the process: NCCL does not use the communicator (user guide)
    return more != nullptr && *more != '\0' ? out + ", " + more : out;
  }
  /// \param what the failed call or operation of this rank
  static detail::stream_fault fault_of(ncclResult_t r, std::string const& what, member const& m) {
    std::string const place = " on channel '" + m.name + "'";
    return {.what = what + place, .text = text_of(r, m.comm), .of_others = r == ncclRemoteError, .place = place, .peer = m.peer};
  }
  static ncclDataType_t type_of(at::Tensor const& values) {
    constexpr std::pair<at::ScalarType, ncclDataType_t> types[] = {{at::kFloat, ncclFloat32},
                                                                   {at::kDouble, ncclFloat64},
                                                                   {at::kHalf, ncclFloat16},
                                                                   {at::kBFloat16, ncclBfloat16},
                                                                   {at::kByte, ncclUint8}};
    for (auto const& [type, of_nccl] : types) {
      if (values.scalar_type() == type) return of_nccl;
    }
    TORCH_CHECK(false, "gradients of type ", values.scalar_type(), " cannot be summed over replicas");
  }

  /// Calls `one(comm, at, numbers, rank)` for each share with elements, in one group of NCCL calls.
  template <class One>
  void by_shares(channel& c, char const* name, at::Tensor const& values, std::span<std::int64_t const> cut, One const& one) {
    call(c, name, [&](ncclComm_t comm) {
      auto* const memory = static_cast<std::byte*>(values.mutable_data_ptr());
      for (std::size_t r = 0; r + 1 < cut.size(); ++r) {
        if (cut[r] == cut[r + 1]) continue;
        auto const result = one(comm, memory + static_cast<std::size_t>(cut[r]) * values.itemsize(),
                                static_cast<std::size_t>(cut[r + 1] - cut[r]), static_cast<int>(r));
        if (bad(result)) return result;
      }
      return ncclSuccess;
    });
  }

  /// Makes a group of calls of one function of NCCL, unless the streams are ended, or have a fault. \param name the function's
  template <class Calls>
  void call(channel& c, char const* name, Calls const& calls) {
    {
      std::lock_guard const hold(mutex_);
      if (stopped_ || fault_) return;
      ++inside_;
    }
    // Without the mutex: a call that connects takes long, and the stream monitor must be able to query and to abort meanwhile.
    c10::cuda::CUDAGuard const here(device_);
    ncclGroupStart();
    ncclResult_t const asked = calls(c.of->comm);
    ncclResult_t const end = ncclGroupEnd();
    std::lock_guard const hold(mutex_);
    note_return(bad(asked) ? asked : end, name, *c.of, !bad(asked));
  }
  /// Counts a call of NCCL as over, and stores its error for `fault`, unless `abort` caused the error. The caller holds the
  /// mutex.
  void note_return(ncclResult_t result, char const* name, member const& m, bool at_group_end) {
    --inside_;
    if (!bad(result) || stopped_ || fault_) return;
    fault_ = fault_of(result, std::string("call of ") + (at_group_end ? "ncclGroupEnd after " : "") + name, m);
  }

  /// Informs the other ranks that this rank no longer uses the channels. \returns false on failure, or if the calls take more
  /// than 5 s
  bool finalize_all() {
    std::atomic<int> ended{0};  // 1: all calls succeeded, -1: a call failed
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

  /// Names a communicator; NCCL has names since 2.27. \param name must outlive the communicator
  template <class Config>
  static void give_name(Config& config, char const* name) {
    if constexpr (requires { config.commName = name; }) config.commName = name;
  }

  nccl_channel_limits limits_;
  std::mutex aborting_;
  std::deque<member> members_;  // members keep their addresses: NCCL writes to `comm` while it joins
  std::map<void const*, std::pair<at::Tensor, at::Tensor>> staging_;  // device memory of gathers, by the address on the host
};

}  // namespace chevron
