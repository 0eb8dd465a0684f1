#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <c10/cuda/CUDAException.h>

#include <chevron/run/comm/shared_memory/shared_file.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/random_digits.hpp>

/// \file
/// Main memory that the ranks of one channel of copies share: flags that streams write and wait for, and room for gathers.

namespace chevron::detail {

/// What a rank of a channel tells the others.
struct copy_entry {
  std::atomic<std::uint32_t> ready;  ///< all below is there, and the flags that this rank writes
  std::atomic<std::uint32_t> ended;  ///< this rank's streams were ended: what they write from then on means nothing
  std::atomic<std::uint32_t> left;   ///< this rank reaches the others' memory no more
  std::array<char, 33> process;      ///< drawn at random, zero at the end
  std::int32_t device;               ///< as this rank's process numbers GPUs
  std::uint32_t first;               ///< flags begin here
  std::uint64_t piece;               ///< bytes that go at a time
  std::uint64_t pieces;              ///< room for so many
  std::uint64_t memory;              ///< of the GPU: its address in that process, 0 for none
  cudaIpcMemHandle_t handle;         ///< of that memory
};

/// Mapped and registered with CUDA. Flags lie in main memory, so that the host can end the waits of its streams by itself: no
/// call of CUDA's, which might wait for another one, comes between. Each flag has one rank that writes it and one that waits for
/// it, so that a rank which ends its own waits ends nobody else's.
class copy_page {
 public:
  enum class flag : int { here, reduced, taken };  ///< for edges: a piece has come, -, was taken
  static constexpr std::size_t gather_piece = std::size_t{16} << 10;
  static constexpr int most_ranks = 1024;

  /// Makes the memory; rank 0 of a channel joins it first. \returns its name, empty where the system gives none
  static std::string make() {
    auto file = shared_file::make(file_bytes);
    if (file == nullptr) return {};
    std::string const name = file->address();
    std::lock_guard const hold(made().mutex);
    made().files[name] = std::move(file);
    return name;
  }

  /// \throws usage_error where that memory is another machine's, or cannot be registered
  copy_page(std::string const& name, int rank, int size) : rank_(rank), size_(size), file_(open(name, rank)) {
    if (file_ == nullptr) {
      throw usage_error("messages by copies reach the ranks of one machine only, and rank " + std::to_string(rank) + " of " +
                        std::to_string(size) + " of a channel cannot open the memory of its rank 0 (" + name +
                        "): it is on another machine, in another container, or the process has too many files open. Remedy: "
                        "nccl_transport, --backend nccl");
    }
    if (size > most_ranks) {
      throw usage_error("messages by copies are for at most " + std::to_string(most_ranks) + " ranks, not " +
                        std::to_string(size) + ". Remedy: nccl_transport, --backend nccl");
    }
    C10_CUDA_CHECK(cudaHostRegister(file_->memory(), bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped));
    void* seen = nullptr;
    C10_CUDA_CHECK(cudaHostGetDevicePointer(&seen, file_->memory(), 0));
    seen_ = static_cast<std::byte*>(seen);
  }
  ~copy_page() {
    if (seen_ != nullptr) C10_CUDA_CHECK_WARN(cudaHostUnregister(file_->memory()));
  }
  copy_page(copy_page const&) = delete;
  copy_page& operator=(copy_page const&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  copy_entry& of(int rank) const { return *reinterpret_cast<copy_entry*>(at(entries_at(rank))); }
  copy_entry& mine() const { return of(rank_); }

  /// A flag as the host sees it, and as streams do.
  std::atomic_ref<std::uint32_t> host_flag(flag which, int writer, int waiter) const {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(at(flag_at(which, writer, waiter))));
  }
  void* stream_flag(flag which, int writer, int waiter) const { return seen_ + flag_at(which, writer, waiter); }

  /// Room for a piece of a rank's part of a gather, as kernels reach it.
  std::byte* room(int rank) const { return seen_ + rooms_at() + static_cast<std::size_t>(rank) * gather_piece; }

  /// Nobody can open it any more.
  void close() { file_->close(); }

  /// Of this process; ranks that are its threads reach each other's memory without handles.
  static std::string const& process() {
    static std::string const drawn = random_digits(4);
    return drawn;
  }

 private:
  static constexpr std::size_t file_bytes = std::size_t{64} << 20;  // pages that nothing touches cost nothing
  static constexpr std::size_t entry_bytes = 256, flag_kinds = 3;
  static_assert(sizeof(copy_entry) <= entry_bytes && alignof(copy_entry) <= entry_bytes);
  static_assert(most_ranks * (entry_bytes + gather_piece + flag_kinds * sizeof(std::uint32_t) * most_ranks) + 8192 < file_bytes);

  struct files_of_process {
    std::mutex mutex;
    std::map<std::string, std::unique_ptr<shared_file>> files;
  };
  static files_of_process& made() {
    static files_of_process one;
    return one;
  }
  static std::unique_ptr<shared_file> open(std::string const& name, int rank) {
    if (rank != 0) return shared_file::open(name);
    std::lock_guard const hold(made().mutex);
    auto const found = made().files.extract(name);
    return found.empty() ? nullptr : std::move(found.mapped());
  }

  std::size_t count() const { return static_cast<std::size_t>(size_); }
  static std::size_t entries_at(int rank) { return static_cast<std::size_t>(rank) * entry_bytes; }
  std::size_t flag_at(flag which, int writer, int waiter) const {
    auto const row = static_cast<std::size_t>(which) * count() + static_cast<std::size_t>(writer);
    return count() * entry_bytes + (row * count() + static_cast<std::size_t>(waiter)) * sizeof(std::uint32_t);
  }
  std::size_t rooms_at() const { return whole_pages(flag_at(flag::taken, size_ - 1, size_ - 1) + sizeof(std::uint32_t)); }
  std::size_t bytes() const { return rooms_at() + whole_pages(count() * gather_piece); }
  static std::size_t whole_pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  std::byte* at(std::size_t offset) const { return file_->memory() + offset; }

  int rank_, size_;
  std::unique_ptr<shared_file> file_;
  std::byte* seen_ = nullptr;
};

}  // namespace chevron::detail
