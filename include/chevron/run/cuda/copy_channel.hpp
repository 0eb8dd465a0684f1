#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/comm/streams/channel_use.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/cuda/copy_memory.hpp>
#include <chevron/run/cuda/copy_page.hpp>
#include <chevron/run/cuda/stream_memory.hpp>

/// \file
/// One rank's end of a channel of copies: which copies and flags a message, a collective over replicas and a gather are.

namespace chevron {

/// Memory that channels of copies take. All ranks of a job give the same.
struct copy_limits {
  std::size_t edge_piece = std::size_t{4} << 20;  ///< bytes of a message that go at a time, a multiple of 16
  int edge_pieces = 4;                            ///< of an edge, before one must be taken: so much room the receiver has
  std::size_t sum_piece = std::size_t{8} << 20;   ///< bytes of a sum that go at a time, a multiple of 16
  std::uint32_t first = 0;                        ///< where flags begin to count, modulo 2³²
};

namespace detail {

/// All calls but `end_waits` and `is_sound` are of one thread at a time, on the current GPU.
class copy_channel {
 public:
  static constexpr int sender = 0, receiver = 1;  // of an edge

  copy_channel(std::string const& name, channel_use use, int rank, int size, at::Device device, copy_limits const& limits)
      : page_(std::make_shared<copy_page>(name, rank, size)),
        memory_(page_),
        use_(use),
        device_(device),
        reached_(static_cast<std::size_t>(size)) {
    copy_entry& mine = page_->mine();
    std::copy_n(copy_page::process().c_str(), mine.process.size(), mine.process.begin());
    mine.device = device.index();
    mine.first = limits.first;
    // Room for a number of every share.
    std::size_t const sum_piece = std::max(limits.sum_piece, std::size_t{16} * static_cast<std::size_t>(size));
    mine.piece = use == channel_use::edge ? limits.edge_piece : use == channel_use::sum ? sum_piece : 0;
    mine.pieces = use == channel_use::edge ? static_cast<std::uint64_t>(limits.edge_pieces) : 1;
    if (use == channel_use::sum || (use == channel_use::edge && rank == receiver)) memory_.lend(mine.piece * mine.pieces);
    for (flag const which : {flag::here, flag::reduced, flag::taken}) {
      for (int r = 0; r < size; ++r) page_->host_flag(which, rank, r).store(limits.first);
    }
    mine.ready = 1;
  }

  /// All ranks have made their ends.
  bool all_ready() const {
    return all_of_others([](copy_entry const& theirs) { return theirs.ready != 0; });
  }
  /// Once all are ready. \returns false where one has left by now: its memory may be gone
  /// \throws usage_error where ranks cannot reach each other's memory, or have other limits
  bool reach() {
    page_->close();
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      refuse_other_limits(r);
      if (page_->of(r).left != 0) return false;
      if (use_ == channel_use::sum || (use_ == channel_use::edge && r == receiver))
        reached_[static_cast<std::size_t>(r)] = memory_.reach(r, device_);
    }
    return true;
  }

  void send(cudaStream_t on, std::span<at::Tensor const> values) {
    in_pieces(
        values, [&](std::uint64_t piece) { wait(on, flag::taken, receiver, piece - pieces()); },
        [&](std::byte* of_value, std::size_t in_room, std::size_t bytes) {
          copy(memory_of(receiver) + in_room, of_value, bytes, cudaMemcpyDeviceToDevice, on);
        },
        [&](std::uint64_t piece) { write(on, flag::here, receiver, piece); });
  }
  void receive(cudaStream_t on, std::span<at::Tensor const> into) {
    in_pieces(
        into, [&](std::uint64_t piece) { wait(on, flag::here, sender, piece); },
        [&](std::byte* of_value, std::size_t in_room, std::size_t bytes) {
          copy(of_value, memory_of(receiver) + in_room, bytes, cudaMemcpyDeviceToDevice, on);
        },
        [&](std::uint64_t piece) { write(on, flag::taken, sender, piece); });
  }
  void sum(cudaStream_t on, at::Tensor const& values) {
    std::vector<std::int64_t> equal;
    for (int r = 0; r <= size(); ++r) equal.push_back(values.numel() * r / size());
    over_replicas(on, group_collective::all_reduce, values.view({-1}), equal);
  }
  void reduce_scatter(cudaStream_t on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    over_replicas(on, group_collective::reduce_scatter, values.view({-1}), cut);
  }
  void share_gather(cudaStream_t on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    over_replicas(on, group_collective::share_gather, values.view({-1}), cut);
  }
  void gather(cudaStream_t on, at::Tensor const& mine, at::Tensor const& all) {
    if (!scratch_.defined()) {
      c10::cuda::CUDAStreamGuard const there(c10::cuda::getStreamFromExternal(on, device_.index()));
      scratch_ = at::empty({(size() + 1) * static_cast<std::int64_t>(copy_page::gather_piece)},
                           at::TensorOptions(at::kByte).device(device_));
    }
    std::size_t begin = 0;
    do {
      gather_piece(on, begin, mine, all);
      begin += copy_page::gather_piece;
    } while (begin < mine.nbytes());
  }

  /// What streams of this rank write from now on means nothing: the others are told, before any of it is written.
  void tell_end() { page_->mine().ended = 1; }
  /// All that streams of this rank wait for, and may still be asked to wait for, has come. From any thread.
  void end_waits() const {
    std::uint32_t const beyond = number(asked_) + (1U << 30);
    for (flag const which : {flag::here, flag::reduced, flag::taken}) {
      for (int r = 0; r < size(); ++r) page_->host_flag(which, r, rank()).store(beyond);
    }
  }
  /// No other rank has ended its streams: what came so far is what was sent. From any thread.
  bool is_sound() const {
    return all_of_others([](copy_entry const& theirs) { return theirs.ended == 0; });
  }
  /// What the driver said to a call that failed; empty: none has.
  std::string const& fault() const { return fault_; }

 private:
  using flag = copy_page::flag;

  int rank() const { return page_->rank(); }
  int size() const { return page_->size(); }
  std::uint64_t pieces() const { return page_->mine().pieces; }
  std::uint32_t number(std::uint64_t count) const { return page_->mine().first + static_cast<std::uint32_t>(count); }
  /// A rank's memory as this one reaches it.
  std::byte* memory_of(int r) const { return r == rank() ? memory_.own() : reached_[static_cast<std::size_t>(r)]; }
  template <class Holds>
  bool all_of_others(Holds const& holds) const {
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && !holds(page_->of(r))) return false;
    }
    return true;
  }
  void refuse_other_limits(int other) const {
    copy_entry const &mine = page_->mine(), &theirs = page_->of(other);
    if (theirs.piece == mine.piece && theirs.pieces == mine.pieces && theirs.first == mine.first) return;
    auto const words = [](copy_entry const& of) {
      return std::to_string(of.pieces) + " pieces of " + std::to_string(of.piece) + " bytes, from " + std::to_string(of.first);
    };
    throw usage_error("copy_limits differ: rank " + std::to_string(rank()) + " of a channel has " + words(mine) + ", rank " +
                      std::to_string(other) + " has " + words(theirs) + ". Remedy: give every rank the same");
  }

  /// Walks over the memory of tensors in pieces, the same at both ends of an edge: each begins with `begin(number)`, has parts of
  /// tensors, `part(of_value, in_room, bytes)`, and ends with `end(number)`.
  template <class Begin, class Part, class End>
  void in_pieces(std::span<at::Tensor const> values, Begin const& begin, Part const& part, End const& end) {
    std::size_t const piece = page_->mine().piece;
    std::uint64_t number = 0;  // 0: none has begun
    std::size_t filled = 0;
    auto const finish = [&] {
      if (number != 0) end(number);
      number = 0;
    };
    for (at::Tensor const& value : values) {
      auto* const memory = static_cast<std::byte*>(value.mutable_data_ptr());
      for (std::size_t done = 0; done < value.nbytes();) {
        if (number == 0) {
          begin(number = ++asked_);
          filled = 0;
        }
        std::size_t const bytes = std::min(piece - filled, value.nbytes() - done);
        part(memory + done, (number - 1) % pieces() * piece + filled, bytes);
        done += bytes;
        filled += (bytes + 15) / 16 * 16;
        if (filled >= piece) finish();
      }
    }
    finish();
  }

  void over_replicas(cudaStream_t on, group_collective what, at::Tensor const& values, std::span<std::int64_t const> cut) {
    c10::cuda::CUDAStreamGuard const there(c10::cuda::getStreamFromExternal(on, device_.index()));
    at::NoGradGuard const off;
    // Numbers of a piece that are of one share.
    auto const most = static_cast<std::int64_t>(page_->mine().piece / values.itemsize()) / size();
    bool const adds = what != group_collective::share_gather;
    if (adds && (!scratch_.defined() || scratch_.scalar_type() != values.scalar_type()))
      scratch_ = at::empty({most}, values.options());
    std::int64_t longest = 0;
    for (std::size_t r = 0; r + 1 < cut.size(); ++r) longest = std::max(longest, cut[r + 1] - cut[r]);
    for (std::int64_t done = 0; done < longest; done += most) {
      await_room_in_queue();
      piece_over_replicas(on, what, values, cut, done, most);
    }
  }

  /// Waits on the host until the stream has few pieces of a collective before it. A stream takes about a thousand operations;
  /// the call that asks for one more waits inside the driver, with the lock of the process on the GPU. Another rank of the
  /// process, whose flags the stream waits for, could then ask for nothing (seen on an H200 with driver 580).
  void await_room_in_queue() const {
    constexpr std::uint64_t operations = 128;
    if (size() == 1) return;
    auto const others = static_cast<std::uint64_t>(size() - 1);
    std::uint64_t const ahead = std::max<std::uint64_t>(2, operations / (9 * others + 4));  // operations of piece_over_replicas
    if (asked_ < ahead) return;
    auto const done = page_->host_flag(flag::taken, rank(), rank() == 0 ? 1 : 0);  // the last operation of a piece
    while (static_cast<std::int32_t>(done.load() - number(asked_ - ahead + 1)) < 0) {
      if (page_->mine().ended != 0 || !fault_.empty()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  /// Of every share the numbers from `done` on, `most` of them.
  void piece_over_replicas(cudaStream_t on, group_collective what, at::Tensor const& values, std::span<std::int64_t const> cut,
                           std::int64_t done, std::int64_t most) {
    std::uint64_t const number = ++asked_;
    auto const each = values.itemsize();
    auto const offset = [&](int share) { return cut[static_cast<std::size_t>(share)]; };
    auto const begin_of = [&](int share) { return std::min(offset(share) + done, offset(share + 1)); };
    auto const count_of = [&](int share) { return std::min(most, offset(share + 1) - begin_of(share)); };
    auto const bytes_of = [&](int share) { return static_cast<std::size_t>(count_of(share)) * each; };
    auto const in_memory = [&](int of, int share) { return memory_of(of) + static_cast<std::size_t>(share * most) * each; };
    auto* const memory = static_cast<std::byte*>(values.mutable_data_ptr());
    auto const in_values = [&](int share) { return memory + static_cast<std::size_t>(begin_of(share)) * each; };
    auto const on_gpu = cudaMemcpyDeviceToDevice;
    bool const adds = what != group_collective::share_gather, takes = what != group_collective::reduce_scatter;
    int const me = rank();

    wait_for_all(on, flag::taken, number - 1);  // what this rank laid out before
    for (int share = 0; share < size(); ++share) {
      if (adds || share == me) copy(in_memory(me, share), in_values(share), bytes_of(share), on_gpu, on);
    }
    write_to_all(on, flag::here, number);
    wait_for_all(on, flag::here, number);
    if (std::size_t const bytes = bytes_of(me); adds && bytes > 0) {
      at::Tensor const total = values.narrow(0, begin_of(me), count_of(me));
      at::Tensor const other = scratch_.narrow(0, 0, total.numel());
      copy(in_values(me), in_memory(0, me), bytes, on_gpu, on);
      for (int r = 1; r < size(); ++r) {
        copy(static_cast<std::byte*>(other.mutable_data_ptr()), in_memory(r, me), bytes, on_gpu, on);
        total.add_(other);
      }
      // Only this rank reads its own share of what it laid out.
      if (takes) copy(in_memory(me, me), in_values(me), bytes, on_gpu, on);
    }
    if (adds && takes) write_to_all(on, flag::reduced, number);
    for (int r = 0; r < size(); ++r) {
      if (!takes || r == me) continue;
      if (adds) wait(on, flag::reduced, r, number);
      copy(in_values(r), in_memory(r, r), bytes_of(r), on_gpu, on);
    }
    write_to_all(on, flag::taken, number);
  }

  void gather_piece(cudaStream_t on, std::size_t begin, at::Tensor const& mine, at::Tensor const& all) {
    std::uint64_t const number = ++asked_;
    std::size_t const whole = mine.nbytes(), bytes = std::min(copy_page::gather_piece, whole - begin);
    auto* const scratch = static_cast<std::byte*>(scratch_.mutable_data_ptr());
    auto const scratch_of = [&](int r) { return scratch + static_cast<std::size_t>(r + 1) * copy_page::gather_piece; };
    auto* const from = static_cast<std::byte*>(mine.mutable_data_ptr()) + begin;
    auto* const into = static_cast<std::byte*>(all.mutable_data_ptr()) + begin;
    // By way of the GPU: the host would wait for a copy from main memory to main memory.
    wait_for_all(on, flag::taken, number - 1);
    copy(scratch, from, bytes, cudaMemcpyHostToDevice, on);
    copy(page_->room(rank()), scratch, bytes, cudaMemcpyDeviceToHost, on);
    write_to_all(on, flag::here, number);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) wait(on, flag::here, r, number);
      copy(scratch_of(r), page_->room(r), bytes, cudaMemcpyHostToDevice, on);
    }
    write_to_all(on, flag::taken, number);
    for (int r = 0; r < size(); ++r)
      copy(into + static_cast<std::size_t>(r) * whole, scratch_of(r), bytes, cudaMemcpyDeviceToHost, on);
  }

  static void copy(std::byte* to, std::byte const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t on) {
    if (bytes > 0) C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, on));
  }
  void write(cudaStream_t on, flag which, int waiter, std::uint64_t count) {
    check(driver_.write(on, page_->stream_flag(which, rank(), waiter), number(count)), "cuStreamWriteValue32");
  }
  void wait(cudaStream_t on, flag which, int writer, std::uint64_t count) {
    check(driver_.wait(on, page_->stream_flag(which, writer, rank()), number(count)), "cuStreamWaitValue32");
  }
  void write_to_all(cudaStream_t on, flag which, std::uint64_t count) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) write(on, which, r, count);
    }
  }
  void wait_for_all(cudaStream_t on, flag which, std::uint64_t count) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) wait(on, which, r, count);
    }
  }
  void check(CUresult result, char const* call) {
    if (result != CUDA_SUCCESS && fault_.empty())
      fault_ = std::string("CUDA: ") + call + " failed with " + std::to_string(result);
  }

  std::shared_ptr<copy_page> page_;
  copy_memory memory_;
  channel_use use_;
  at::Device device_;
  std::vector<std::byte*> reached_;      // by rank
  std::atomic<std::uint64_t> asked_{0};  // pieces
  at::Tensor scratch_;
  std::string fault_;
  stream_memory const& driver_ = stream_memory::of_driver();
};

}  // namespace detail
}  // namespace chevron
