#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/transports/gpu/copy_memory.hpp>
#include <chevron/transports/gpu/copy_page.hpp>
#include <chevron/transports/gpu/stream_memory.hpp>
#include <chevron/transports/streams/stream_fault.hpp>

/// \file
/// One rank's end of a copy channel: enqueues the copies and flags of messages, of collectives over a group, and of gathers.

namespace chevron {

/// Limits of the memory of copy channels. All ranks of a job must give the same limits.
struct copy_limits {
  std::size_t edge_piece = std::size_t{4} << 20;  ///< bytes of a message's piece, a multiple of 16
  int edge_pieces = 4;                            ///< number of pieces for which the receiver of an edge has memory
  std::size_t sum_piece = std::size_t{8} << 20;   ///< bytes of a sum's piece, a multiple of 16
  std::uint32_t first = 0;                        ///< initial value of flags, which count pieces modulo 2³²
};

namespace detail {

/// One rank's end of a channel. Streams of the current GPU run the copies. Not thread-safe, except for `tell_end`, `end_waits`
/// and `is_sound`.
class copy_channel {
 public:
  static constexpr int sender = 0, receiver = 1;  // ranks of an edge's channel

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
    // room for at least 16 bytes of every share
    std::size_t const sum_piece = std::max(limits.sum_piece, std::size_t{16} * static_cast<std::size_t>(size));
    mine.piece = use == channel_use::edge ? limits.edge_piece : use == channel_use::sum ? sum_piece : 0;
    mine.pieces = use == channel_use::edge ? static_cast<std::uint64_t>(limits.edge_pieces) : 1;
    if (use == channel_use::sum || (use == channel_use::edge && rank == receiver)) memory_.lend(mine.piece * mine.pieces);
    load_kernels();
    for (flag const which : {flag::here, flag::reduced, flag::taken}) {
      for (int r = 0; r < size; ++r) page_->host_flag(which, rank, r).store(limits.first);
    }
    mine.ready = 1;
  }

  /// Whether all other ranks have made their ends.
  bool all_ready() const {
    return all_of_others([](copy_entry const& theirs) { return theirs.ready != 0; });
  }
  /// Maps the memory of the other ranks, which must be ready. \returns false if a rank has left, since its memory may be freed
  /// \throws usage_error if ranks cannot reach each other's memory, are threads on one GPU, or have different limits
  bool reach() {
    page_->close();
    refuse_shared_gpu();
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
          copy(memory_of(receiver) + in_room, of_value, bytes);
        },
        [&](std::uint64_t piece) { write(on, flag::here, receiver, piece); });
  }
  void receive(cudaStream_t on, std::span<at::Tensor const> into) {
    in_pieces(
        into, [&](std::uint64_t piece) { wait(on, flag::here, sender, piece); },
        [&](std::byte* of_value, std::size_t in_room, std::size_t bytes) {
          copy(of_value, memory_of(receiver) + in_room, bytes);
        },
        [&](std::uint64_t piece) { write(on, flag::taken, sender, piece); });
  }
  void sum(cudaStream_t on, at::Tensor const& values) {
    std::vector<std::int64_t> equal;
    for (int r = 0; r < size(); ++r) equal.push_back(whole_words(values, values.numel() * r / size()));
    equal.push_back(values.numel());
    over_replicas(on, group_collective::all_reduce, values.view({-1}), equal);
  }
  void reduce_scatter(cudaStream_t on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    over_replicas(on, group_collective::reduce_scatter, values.view({-1}), cut);
  }
  void share_gather(cudaStream_t on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    over_replicas(on, group_collective::share_gather, values.view({-1}), cut);
  }
  /// Gathers through main memory. \param mine, all tensors in pinned memory, which the GPU can access
  void gather(cudaStream_t on, at::Tensor const& mine, at::Tensor const& all) {
    std::size_t begin = 0;
    do {
      gather_piece(on, begin, mine, all);
      begin += copy_page::gather_piece;
    } while (begin < mine.nbytes());
  }

  /// Informs the other ranks that flags and values of this rank's streams are invalid from now on. To be called before
  /// `end_waits`.
  void tell_end() { page_->mine().ended = 1; }
  /// Ends the waits of this rank's streams, including waits for later pieces: sets the flags 2³⁰ pieces ahead.
  void end_waits() const {
    std::uint32_t const beyond = number(asked_) + (1U << 30);
    for (flag const which : {flag::here, flag::reduced, flag::taken}) {
      for (int r = 0; r < size(); ++r) page_->host_flag(which, r, rank()).store(beyond);
    }
  }
  /// Whether no other rank has ended its streams, so that all received values are as sent.
  bool is_sound() const {
    return all_of_others([](copy_entry const& theirs) { return theirs.ended == 0; });
  }
  /// The first failed call of the driver, with its result; false if no call failed.
  stream_fault const& fault() const { return fault_; }

 private:
  using flag = copy_page::flag;

  int rank() const { return page_->rank(); }
  int size() const { return page_->size(); }
  std::uint64_t pieces() const { return page_->mine().pieces; }
  std::uint32_t number(std::uint64_t count) const { return page_->mine().first + static_cast<std::uint32_t>(count); }
  /// The address of a rank's memory in this process.
  std::byte* memory_of(int r) const { return r == rank() ? memory_.own() : reached_[static_cast<std::size_t>(r)]; }
  template <class Holds>
  bool all_of_others(Holds const& holds) const {
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && !holds(page_->of(r))) return false;
    }
    return true;
  }
  /// Refuses rank threads that share a GPU: CUDA does not promise that streams of one process run at the same time. Two rank
  /// threads on one H200 (driver 580) waited for each other for ever in their first step; rank processes did not
  /// (docs/reference/gpu-runs.md).
  void refuse_shared_gpu() const {
    for (int b = 1; b < size(); ++b) {
      for (int a = 0; a < b; ++a) {
        if (page_->of(a).process != page_->of(b).process || page_->of(a).device != page_->of(b).device) continue;
        throw usage_error("ranks " + std::to_string(a) + " and " + std::to_string(b) +
                          " of a channel of copies are threads of one process on GPU " + std::to_string(page_->of(a).device) +
                          ", whose streams may wait for each other for ever. Remedy: a process for each rank, or run_threads");
      }
    }
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

  /// Divides the memory of tensors into pieces, equally at both ends of an edge. Calls for each piece `begin(number)`, then
  /// `part(of_value, in_room, bytes)` for each part of a tensor, then `end(number)`.
  template <class Begin, class Part, class End>
  void in_pieces(std::span<at::Tensor const> values, Begin const& begin, Part const& part, End const& end) {
    std::size_t const piece = page_->mine().piece;
    std::uint64_t number = 0;  // 0: between pieces
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

  /// Rounds a number of elements down to a multiple of 16 bytes, which kernels load at once.
  static std::int64_t whole_words(at::Tensor const& values, std::int64_t count) {
    std::int64_t const of_word = std::max<std::int64_t>(1, 16 / static_cast<std::int64_t>(values.itemsize()));
    return count / of_word * of_word;
  }
  void over_replicas(cudaStream_t on, group_collective what, at::Tensor const& values, std::span<std::int64_t const> cut) {
    // elements of each share in a piece
    std::int64_t const most = whole_words(values, static_cast<std::int64_t>(page_->mine().piece / values.itemsize()) / size());
    std::int64_t longest = 0;
    for (std::size_t r = 0; r + 1 < cut.size(); ++r) longest = std::max(longest, cut[r + 1] - cut[r]);
    for (std::int64_t done = 0; done < longest; done += most) piece_over_replicas(on, what, values, cut, done, most);
  }

  /// Enqueues the collective for at most `most` elements of every share, from element `done` of the share on.
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
    bool const adds = what != group_collective::share_gather, takes = what != group_collective::reduce_scatter;
    int const me = rank();

    wait_for_all(on, flag::taken, number - 1);  // until all have read this rank's previous piece
    for (int share = 0; share < size(); ++share) {
      if (adds || share == me) copy(in_memory(me, share), in_values(share), bytes_of(share));
    }
    write_to_all(on, flag::here, number);
    wait_for_all(on, flag::here, number);
    if (std::size_t const bytes = bytes_of(me); adds && bytes > 0) {
      at::Tensor const total = values.narrow(0, begin_of(me), count_of(me));
      copy(in_values(me), in_memory(0, me), bytes);
      for (int r = 1; r < size(); ++r) total.add_(on_gpu(in_memory(r, me), count_of(me), values.scalar_type()));
      // The other ranks read only their own shares in this rank's memory, so the sum may replace this rank's share there.
      if (takes) copy(in_memory(me, me), in_values(me), bytes);
    }
    if (adds && takes) write_to_all(on, flag::reduced, number);
    for (int r = 0; r < size(); ++r) {
      if (!takes || r == me) continue;
      if (adds) wait(on, flag::reduced, r, number);
      copy(in_values(r), in_memory(r, r), bytes_of(r));
    }
    write_to_all(on, flag::taken, number);
  }

  void gather_piece(cudaStream_t on, std::size_t begin, at::Tensor const& mine, at::Tensor const& all) {
    std::uint64_t const number = ++asked_;
    std::size_t const whole = mine.nbytes(), bytes = std::min(copy_page::gather_piece, whole - begin);
    auto* const from = static_cast<std::byte*>(mine.mutable_data_ptr()) + begin;
    auto* const into = static_cast<std::byte*>(all.mutable_data_ptr()) + begin;
    wait_for_all(on, flag::taken, number - 1);
    copy(page_->room(rank()), from, bytes);
    write_to_all(on, flag::here, number);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) wait(on, flag::here, r, number);
      copy(into + static_cast<std::size_t>(r) * whole, page_->room(r), bytes);
    }
    write_to_all(on, flag::taken, number);
  }

  /// Launches each kernel before any stream waits for a flag: CUDA loads a kernel at its first launch, and may wait for all
  /// streams of the process meanwhile. Aligned and unaligned memory have different kernels.
  void load_kernels() const {
    auto const on_both = [this](at::ScalarType type, auto const& work) {
      at::Tensor const row = at::zeros({16}, at::TensorOptions(type).device(device_));
      for (std::int64_t const begin : {0, 1}) work(row.narrow(0, begin, 4), row.narrow(0, 8 + begin, 4));
    };
    for (at::ScalarType const type : {at::kInt, at::kByte})
      on_both(type, [](at::Tensor into, at::Tensor const& from) { at::bitwise_or_out(into, from, 0); });
    if (use_ != channel_use::sum) return;
    for (at::ScalarType const type : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kLong})
      on_both(type, [](at::Tensor const& into, at::Tensor const& from) { into.add_(from); });
  }
  at::Tensor on_gpu(std::byte* memory, std::int64_t count, at::ScalarType type) const {
    return at::for_blob(memory, count).options(at::TensorOptions(type).device(device_)).target_device(device_).make_tensor();
  }
  /// Copies on the current stream, by a kernel. `Tensor::copy_` would use a copy of CUDA's runtime, and such copies of several
  /// streams may share a queue: a copy behind a wait for a flag could then block the copy after which the flag is written.
  void copy(std::byte* to, std::byte* from, std::size_t bytes) const {
    constexpr std::size_t word = sizeof(std::int32_t);
    auto const address = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
    std::size_t const in_words = address % word == 0 ? bytes / word * word : 0;
    copy_elements(to, from, in_words / word, at::kInt);
    copy_elements(to + in_words, from + in_words, bytes - in_words, at::kByte);
  }
  void copy_elements(std::byte* to, std::byte* from, std::size_t count, at::ScalarType type) const {
    if (count == 0) return;
    auto const elements = static_cast<std::int64_t>(count);
    at::Tensor into = on_gpu(to, elements, type);
    at::bitwise_or_out(into, on_gpu(from, elements, type), 0);
  }
  void write(cudaStream_t on, flag which, int waiter, std::uint64_t count) {
    check(driver_.write(on, page_->stream_flag(which, rank(), waiter), number(count)), "cuStreamWriteValue32");
  }
  void wait(cudaStream_t on, flag which, int writer, std::uint64_t count) {
    check(driver_.wait(on, page_->stream_flag(which, writer, rank()), number(count), flushes_), "cuStreamWaitValue32");
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
    if (result != CUDA_SUCCESS && !fault_)
      fault_ = {.what = std::string("call of ") + call, .text = "CUDA: error " + std::to_string(result)};
  }

  std::shared_ptr<copy_page> page_;
  copy_memory memory_;
  channel_use use_;
  at::Device device_;
  std::vector<std::byte*> reached_;      // by rank
  std::atomic<std::uint64_t> asked_{0};  // pieces enqueued so far
  stream_fault fault_;
  stream_memory const& driver_ = stream_memory::of_driver();
  bool flushes_ = driver_.can_flush(device_.index());
};

}  // namespace detail
}  // namespace chevron
