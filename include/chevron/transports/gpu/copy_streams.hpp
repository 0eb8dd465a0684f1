#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/transports/gpu/copy_channel.hpp>
#include <chevron/transports/gpu/copy_page.hpp>
#include <chevron/transports/gpu/gpu_streams.hpp>
#include <chevron/transports/gpu/stream_memory.hpp>

/// \file
/// Channels between the streams of GPUs in one machine, made of copies and of flags in memory.

namespace chevron {

/// The `Streams` of a `stream_transport` (tests/support/host_streams.hpp documents the members) between GPUs of one machine, or
/// on one GPU, without NCCL. Ranks are processes, or threads on GPUs of their own. A waiting stream occupies no multiprocessor;
/// copies and sums do.
///
/// A message goes in pieces through memory of the receiver's GPU. The sender's stream waits until a piece's memory is free,
/// copies, and writes a flag; the receiver's stream waits for the flag, copies, and writes a flag back. A sum goes in pieces,
/// each with a part of every share: each rank copies its piece into its channel memory, sums its own share over the channel
/// memory of all ranks, in the order of ranks, and copies the other shares from their ranks. A reduce-scatter ends after the
/// sums; a gather of shares consists of the copies alone. `all_gather` goes through main memory.
class copy_streams final : public detail::gpu_streams {
 public:
  class channel {
    friend copy_streams;
    std::shared_ptr<detail::copy_channel> at;
  };

  /// Checks GPU and limits. \throws usage_error if the GPU or its driver has no stream memory operations, or pieces are not
  /// multiples of 16 bytes
  explicit copy_streams(at::Device on, copy_limits limits = {}) : gpu_streams(on), limits_(limits) {
    for (std::size_t const piece : {limits.edge_piece, limits.sum_piece}) {
      if (piece > 0 && piece % 16 == 0 && limits.edge_pieces > 0) continue;
      throw usage_error("copy_limits have pieces of " + std::to_string(piece) + " bytes, " + std::to_string(limits.edge_pieces) +
                        " of them on an edge. Remedy: multiples of 16 bytes, at least one piece");
    }
    detail::stream_memory::of_driver().refuse_without(on.index());
  }
  ~copy_streams() {
    if (all_.empty()) return;  // perhaps the process gets no context on the GPU: selecting the GPU would throw
    if (!stopped_ && !is_idle()) abort();
    c10::cuda::CUDAGuard const here(device_);
    channels_.clear();
  }

  /// Creates a stream. \throws usage_error if the rank has more streams than the GPU has queues: streams in one queue may wait
  /// for each other for ever
  stream make_stream() {
    stream out = gpu_streams::make_stream();
    std::lock_guard const hold(mutex_);
    all_.push_back(out);
    constexpr std::size_t queues = 32, lanes = 2;
    if (all_.size() + lanes <= queues) return out;
    throw usage_error("the rank needs " + std::to_string(all_.size() + lanes) + " streams on GPU " +
                      std::to_string(device_.index()) + ", which has " + std::to_string(queues) +
                      " queues for a process: streams that share one may wait for each other for ever. Remedy: a schedule with "
                      "fewer neighbours of a rank, or nccl_transport");
  }

  static std::string make_id() { return detail::copy_page::make(); }
  /// Makes this rank's end of a channel, and waits for the other ranks' ends. \returns this rank's end; an end without effect
  /// after `abort`, once `stop()` is true, or if a rank has left
  /// \throws usage_error if ranks cannot reach each other, or have different limits
  template <class Stop>
  channel connect(std::string const&, std::string const& id, channel_use use, int rank, int size, int, Stop const& stop) {
    channel out;
    call const inside(*this);
    if (!inside) return out;
    c10::cuda::CUDAGuard const here(device_);
    auto const made = std::make_shared<detail::copy_channel>(id, use, rank, size, device_, limits_);
    {
      std::lock_guard const hold(mutex_);
      channels_.push_back(made);
    }
    while (!made->all_ready()) {
      if (stopped_ || stop()) return out;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (made->reach()) out.at = made;
    return out;
  }

  /// Sends from rank 0 of a channel to rank 1.
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    ask(c, on, [&](detail::copy_channel& way) { way.send(on.get(), values); });
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    ask(c, on, [&](detail::copy_channel& way) { way.receive(on.get(), into); });
  }
  /// Sums values in place over all ranks of a channel, in the order of ranks.
  void sum(channel& c, stream& on, at::Tensor const& values) {
    ask(c, on, [&](detail::copy_channel& way) { way.sum(on.get(), values); });
  }
  /// Sums each share on its own rank only, in the order of ranks: elements [cut[r], cut[r + 1]) are the share of rank r.
  void reduce_scatter(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    ask(c, on, [&](detail::copy_channel& way) { way.reduce_scatter(on.get(), values, cut); });
  }
  /// Copies every rank's share to all ranks.
  void share_gather(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    ask(c, on, [&](detail::copy_channel& way) { way.share_gather(on.get(), values, cut); });
  }
  /// Gathers each rank's `mine` into every rank's `all`, in rank order. `bytes()` makes both.
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    ask(c, on, [&](detail::copy_channel& way) { way.gather(on.get(), mine, all); });
  }

  detail::stream_fault fault() {
    std::lock_guard const hold(mutex_);
    return fault_;
  }
  /// Ends all operations for good: informs the other ranks that later values of these streams are invalid, then sets the flags
  /// that these streams wait for. Repeats both until no call is under way and all streams are idle, since another rank's stream
  /// may set a flag back.
  void abort() {
    std::lock_guard const one_at_a_time(aborting_);
    {
      std::lock_guard const hold(mutex_);
      stopped_ = true;
    }
    for (bool idle = false; !idle;) {
      {
        std::lock_guard const hold(mutex_);
        for (auto const& each : channels_) each->tell_end();
        for (auto const& each : channels_) each->end_waits();
        idle = inside_ == 0;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      idle = idle && is_idle();
    }
  }

 private:
  /// Counts a thread as inside a call. Converts to false if the streams are ended, or have a fault.
  class call {
   public:
    explicit call(copy_streams& of) : of_(of) {
      std::lock_guard const hold(of_.mutex_);
      good_ = !of_.stopped_ && !of_.fault_;
      ++of_.inside_;
    }
    ~call() {
      std::lock_guard const hold(of_.mutex_);
      --of_.inside_;
    }
    call(call const&) = delete;
    call& operator=(call const&) = delete;
    explicit operator bool() const { return good_; }

   private:
    copy_streams& of_;
    bool good_ = false;
  };

  template <class Work>
  void ask(channel& c, stream& on, Work const& work) {
    call const inside(*this);
    if (!inside || c.at == nullptr) return;
    c10::cuda::CUDAStreamGuard const there(c10::cuda::getStreamFromExternal(on.get(), device_.index()));
    at::AutoDispatchBelowADInplaceOrView const values_alone;
    work(*c.at);
    if (c.at->fault()) note(c.at->fault());
  }

  /// Whether no other rank has ended its streams: ended streams write flags for pieces that they have not copied.
  bool is_sound() override {
    std::lock_guard const hold(mutex_);
    return std::all_of(channels_.begin(), channels_.end(), [](auto const& each) { return each->is_sound(); });
  }
  bool is_idle() {
    std::lock_guard const hold(mutex_);
    c10::cuda::CUDAGuard const here(device_);
    return std::all_of(all_.begin(), all_.end(), [](stream const& each) {
      bool const busy = cudaStreamQuery(each.get()) == cudaErrorNotReady;
      if (busy) static_cast<void>(cudaGetLastError());
      return !busy;
    });
  }

  copy_limits limits_;
  std::mutex aborting_;
  std::vector<stream> all_;
  std::vector<std::shared_ptr<detail::copy_channel>> channels_;
};

}  // namespace chevron
