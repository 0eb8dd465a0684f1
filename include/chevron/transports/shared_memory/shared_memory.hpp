#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/comm/gather.hpp>
#include <chevron/transports/shared_memory/shared_file.hpp>

/// \file
/// Memory that the ranks of one machine share, for small messages, gathers and sums over a group.
///
/// Each rank has one file in memory. Only this rank writes to the file, except to counters; the other ranks read the file.
/// Every wait has a time limit. Only the collective `make` throws: errors of its gathers.

namespace chevron::detail {

template <class Number>
Number read(Number& shared) {
  return std::atomic_ref<Number>(shared).load();
}
template <class Number>
void publish(Number& shared, Number value) {
  std::atomic_ref<Number>(shared).store(value);
}

/// The header of a message. The n-th transfer of the message is stored at `offset[n % 2]` of the sender's file, from when the
/// sender sets `sent` to n until the receiver sets `taken` to n. So a sender may be two transfers ahead of the receiver.
struct alignas(64) shared_message {
  std::uint64_t sent, taken;
  std::array<std::uint64_t, 2> offset;
};

/// One rank's progress in collectives, which run in pieces of at most 1 MiB: numbers of pieces that the rank has written for
/// other ranks, reduced, and gathered (finished reading). A buffer is reused once every rank has gathered the piece in it.
struct sum_progress {
  std::uint64_t copied, reduced, gathered;
};
/// Identifies the collective of a piece; must be equal on all members. `cut` is a fingerprint of the offsets of shares.
struct sum_label {
  std::int64_t what, bucket, type, bytes;
  std::uint64_t cut;
  bool operator==(sum_label const&) const = default;
};

/// This rank's file, and the mapped files of other ranks on this machine.
class shared_memory {
 public:
  static constexpr std::size_t largest_message = std::size_t{1} << 20;
  static constexpr std::size_t largest_gather = (std::size_t{1} << 16) - sizeof(std::size_t);
  static constexpr std::size_t sum_piece = std::size_t{1} << 20;  ///< most bytes of a piece
  static constexpr std::uint64_t reduction_buffers = 4;           ///< pieces in use at one time
  enum class wakeup { rank, sums };                               ///< the thread that sleeps: the rank's, or its sums' thread

  /// A buffer in this rank's file, and the message last stored there.
  struct block {
    std::uint64_t offset;
    shared_message* message = nullptr;
    std::uint64_t number = 0;
    bool is_free() const { return message == nullptr || read(message->taken) >= number; }
  };

  /// Creates this rank's file. \returns null if the system refuses the file
  static std::unique_ptr<shared_memory> make(int rank, int world) {
    auto file = shared_file::make(file_bytes);
    if (file == nullptr) return nullptr;
    auto out = std::unique_ptr<shared_memory>(new shared_memory(rank));
    out->files_.resize(static_cast<std::size_t>(world));
    out->files_[static_cast<std::size_t>(rank)] = std::move(file);
    return out;
  }
  /// Creates the files of all ranks that `line` connects; two ranks map each other's files if each can map the other's.
  /// Collective: a rank that wants no shared memory must also call it, with `wanted` false.
  /// \param line has `all_gather_text` and `all_gather`, like `transport` \returns null if not wanted or not possible
  template <class Line>
  static std::unique_ptr<shared_memory> make(bool wanted, int rank, int world, Line& line) {
    auto out = wanted ? make(rank, world) : nullptr;
    auto const addresses = line.all_gather_text(out == nullptr ? "" : out->address());
    auto const ranks = static_cast<std::size_t>(world);
    std::vector<double> mapped(ranks), all(ranks * ranks);
    for (std::size_t r = 0; r < ranks; ++r) mapped[r] = out != nullptr && out->map(static_cast<int>(r), addresses[r]) ? 1 : 0;
    line.all_gather(mapped, all);
    if (out == nullptr) return nullptr;
    out->own().close();
    for (std::size_t r = 0; r < ranks; ++r) {
      if (all[r * ranks + static_cast<std::size_t>(rank)] == 0) out->files_[r].reset();
    }
    out->mapped_ = std::move(all);
    auto const sharers = std::count_if(out->files_.begin(), out->files_.end(), [](auto const& file) { return file != nullptr; });
    cpu_set_t processors;
    out->has_processors_ =
        ::sched_getaffinity(0, sizeof processors, &processors) == 0 && sharers <= static_cast<long>(CPU_COUNT(&processors));
    return out;
  }

  std::string address() const { return own().address(); }
  /// Maps another rank's file. \param address by `address()` of that rank \returns whether the file is mapped
  bool map(int rank, std::string const& address) {
    auto& file = files_[static_cast<std::size_t>(rank)];
    if (rank != rank_) file = shared_file::open(address);
    if (file != nullptr && file->bytes() != file_bytes) file.reset();
    return file != nullptr;
  }
  /// Whether the ranks that share memory with this one are at most as many as the processors that this process may use.
  bool has_processors() const { return has_processors_; }
  bool shares_memory_with(int rank) const { return files_[static_cast<std::size_t>(rank)] != nullptr; }
  /// Whether all of these ranks map each other's files. The result is equal on all of them.
  bool are_near(std::span<int const> ranks) const {
    auto const reads = [&](int reader, int owner) {
      return mapped_[static_cast<std::size_t>(reader) * files_.size() + static_cast<std::size_t>(owner)] != 0;
    };
    return !mapped_.empty() && std::all_of(ranks.begin(), ranks.end(), [&](int reader) {
      return std::all_of(ranks.begin(), ranks.end(), [&](int owner) { return reads(reader, owner); });
    });
  }

  // ---- Sending

  /// Allocates the header of a message in this rank's file; null if there is no room.
  shared_message* new_message() {
    if (messages_ == most_messages) return nullptr;
    return new (at(rank_, first_message + messages_++ * sizeof(shared_message))) shared_message{};
  }
  /// The header's offset in this rank's file, which the receiver passes to `message_of`.
  std::int64_t offset_of(shared_message const& message) const {
    return reinterpret_cast<std::byte const*>(&message) - own().memory();
  }
  shared_message* message_of(int rank, std::uint64_t offset) const { return reinterpret_cast<shared_message*>(at(rank, offset)); }
  /// Returns the first free block of this size, or a new block; null if there is no room. Using the first free block keeps the
  /// number of used blocks small, so that they remain in the processor's caches.
  block* free_block(std::size_t bytes) {
    auto& blocks = blocks_of(bytes);
    for (block& each : blocks) {
      if (each.is_free()) return &each;
    }
    std::size_t const rounded = (bytes + 63) / 64 * 64;
    if (rounded > file_bytes - next_block_) return nullptr;
    blocks.push_back({.offset = next_block_});
    next_block_ += rounded;
    return &blocks.back();
  }
  /// Whether the receivers have taken all messages.
  bool all_taken() const {
    return std::all_of(blocks_.begin(), blocks_.end(), [](auto const& of_size) {
      return std::all_of(of_size.second.begin(), of_size.second.end(), [](block const& each) { return each.is_free(); });
    });
  }
  /// Releases all messages and blocks. Called once all messages are taken.
  void start_anew() {
    messages_ = 0;
    next_block_ = first_block;
    blocks_.clear();
  }

  std::byte* at(int rank, std::uint64_t offset) const { return file(rank).memory() + offset; }

  // ---- Gathering, if all ranks are on this machine. A gather buffer has two halves, used in turn; a rank begins the next
  // round once it has read the current round.

  /// Writes this rank's part of a gather. \param bytes at most `largest_gather`
  void show(gather_slot slot, void const* mine, std::size_t bytes) {
    auto const round = ++rounds_[static_cast<std::size_t>(slot)];
    std::byte* const here = gather_buffer_of(rank_, slot, round);
    std::memcpy(here, &bytes, sizeof bytes);
    std::memcpy(here + sizeof bytes, mine, bytes);
    auto const world = static_cast<std::uint64_t>(files_.size());
    // Only the last rank of the round wakes the other ranks.
    if (std::atomic_ref(shown(slot)).fetch_add(1) + 1 < round * world) return;
    for (int r = 0; r < static_cast<int>(world); ++r) notify(r);
  }
  /// Whether all ranks have written their parts of the current round.
  bool all_shown(gather_slot slot) const {
    return read(shown(slot)) >= rounds_[static_cast<std::size_t>(slot)] * static_cast<std::uint64_t>(files_.size());
  }
  /// A rank's part of the current round; valid until that rank has called `show` twice more.
  std::span<std::byte const> shown_by(int rank, gather_slot slot) const {
    std::byte const* const there = gather_buffer_of(rank, slot, rounds_[static_cast<std::size_t>(slot)]);
    std::size_t bytes = 0;
    std::memcpy(&bytes, there, sizeof bytes);
    return {there + sizeof bytes, bytes};
  }

  // ---- Collectives over a group (shared_collectives.hpp)

  sum_progress& progress_of(int rank) const { return head_of(rank).progress; }
  /// The label of a rank's piece `number`; reuses the memory of the label of piece `number - reduction_buffers`.
  sum_label& label_of(int rank, std::uint64_t number) const { return head_of(rank).labels[number % reduction_buffers]; }
  std::byte* reduction_buffer_of(int rank, std::uint64_t number) const {
    return at(rank, first_reduction_buffer + number % reduction_buffers * sum_piece);
  }

  // ---- Waiting

  /// Wakes thread `which` of a rank, if the thread is in `sleep`. Called after the awaited value was published.
  void notify(int rank, wakeup which = wakeup::rank) {
    futex_words& words = futex_of(rank, which);
    std::atomic_ref asleep(words.asleep);
    if (asleep.load() == 0 || asleep.exchange(0) == 0) return;
    std::atomic_ref(words.wakeups).fetch_add(1);
    ::syscall(SYS_futex, &words.wakeups, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  /// Makes the calling thread, this rank's thread `which`, sleep until `notify`, for `longest` at most; returns at once if
  /// `came()` is true already.
  template <class Came>
  void sleep(Came const& came, std::chrono::nanoseconds longest, wakeup which = wakeup::rank) {
    futex_words& words = futex_of(rank_, which);
    std::atomic_ref asleep(words.asleep);
    asleep.store(1);
    // A rank that publishes after this store reads `asleep` as 1; `came()` below reads any value published before.
    auto const before = read(words.wakeups);
    if (!came()) {
      timespec const time{.tv_sec = longest.count() / 1'000'000'000, .tv_nsec = longest.count() % 1'000'000'000};
      ::syscall(SYS_futex, &words.wakeups, FUTEX_WAIT, before, &time, nullptr, 0);
    }
    asleep.store(0);
  }

 private:
  struct alignas(64) futex_words {
    std::uint32_t wakeups, asleep;
  };
  /// The first page of a file.
  struct head_words {
    std::array<futex_words, 2> futexes;
    alignas(64) std::array<std::uint64_t, 2> shown;  // by gather slot, in rank 0's file only: number of parts in all rounds
    alignas(64) sum_progress progress;
    alignas(64) std::array<sum_label, reduction_buffers> labels;
  };

  static constexpr std::uint64_t most_messages = 1 << 14;
  static constexpr std::uint64_t gather_buffer_bytes = largest_gather + sizeof(std::size_t);
  static constexpr std::uint64_t first_gather_buffer = 4096;
  static constexpr std::uint64_t first_reduction_buffer = first_gather_buffer + 4 * gather_buffer_bytes;
  static constexpr std::uint64_t first_message = first_reduction_buffer + reduction_buffers * sum_piece;
  static constexpr std::uint64_t first_block = first_message + most_messages * sizeof(shared_message);
  static constexpr std::uint64_t file_bytes = std::uint64_t{1} << 28;
  static_assert(sizeof(head_words) <= first_gather_buffer);

  explicit shared_memory(int rank) : rank_(rank) {}

  shared_file& file(int rank) const { return *files_[static_cast<std::size_t>(rank)]; }
  shared_file& own() const { return file(rank_); }
  head_words& head_of(int rank) const { return *reinterpret_cast<head_words*>(file(rank).memory()); }
  futex_words& futex_of(int rank, wakeup which) const { return head_of(rank).futexes[static_cast<std::size_t>(which)]; }
  std::uint64_t& shown(gather_slot slot) const { return head_of(0).shown[static_cast<std::size_t>(slot)]; }
  std::byte* gather_buffer_of(int rank, gather_slot slot, std::uint64_t round) const {
    return file(rank).memory() + first_gather_buffer + (static_cast<std::uint64_t>(slot) * 2 + round % 2) * gather_buffer_bytes;
  }
  std::vector<block>& blocks_of(std::size_t bytes) {
    for (auto& [size, blocks] : blocks_) {
      if (size == bytes) return blocks;
    }
    return blocks_.emplace_back(bytes, std::vector<block>()).second;
  }

  int rank_;
  std::vector<std::unique_ptr<shared_file>> files_;  // indexed by rank; null: not mapped
  bool has_processors_ = false;
  std::vector<double> mapped_;  // indexed by reader × world + owner: 1 if the reader maps the owner's file
  std::uint64_t messages_ = 0;
  std::uint64_t next_block_ = first_block;
  std::vector<std::pair<std::size_t, std::vector<block>>> blocks_;  // sizes, which are few, and the blocks of each size
  std::array<std::uint64_t, 2> rounds_{};
};

}  // namespace chevron::detail
