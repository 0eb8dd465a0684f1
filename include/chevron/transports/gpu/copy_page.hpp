#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>

#include <chevron/base/random_digits.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/transports/shared_memory/shared_file.hpp>

/// \file
/// Main memory that the ranks of a copy channel share: flags that streams write and wait for, and room for gathers.

namespace chevron::detail {

/// A rank's entry in a channel, read by the other ranks.
struct copy_entry {
  std::atomic<std::uint32_t> ready;  ///< the fields below and the flags that this rank writes are set
  std::atomic<std::uint32_t> ended;  ///< this rank's streams were ended: flags and values that they write later are invalid
  std::atomic<std::uint32_t> left;   ///< this rank no longer accesses the other ranks' memory
  std::array<char, 33> process;      ///< `copy_page::process`, zero-terminated
  std::int32_t device;               ///< this rank's GPU, as its process numbers GPUs
  std::uint32_t first;               ///< initial value of flags
  std::uint64_t piece;               ///< bytes of a piece
  std::uint64_t pieces;              ///< number of pieces for which this rank has memory
  std::uint64_t memory;              ///< address of this rank's GPU memory in its process; 0: none
  cudaIpcMemHandle_t handle;         ///< of that memory
};

/// The shared memory of a channel, mapped, and registered with CUDA. Flags are in main memory, so that the host can end the
/// waits of its streams by a store: a call of CUDA could wait for another call. Each flag has one writing rank and one waiting
/// rank, so that a rank which ends its own waits does not end waits of other ranks.
class copy_page {
 public:
  /// Each flag counts pieces: `here` those that may be read, `reduced` those that are summed and may be read, `taken` those
  /// that were read.
  enum class flag : int { here, reduced, taken };
  static constexpr std::size_t gather_piece = std::size_t{16} << 10;
  static constexpr int most_ranks = 1024;

  /// Creates the memory of a channel whose rank 0 is in this process.
  /// \returns the memory's name, for all ranks; empty if the system has no memory
  static std::string make() {
    auto file = shared_file::make(file_bytes);
    if (file == nullptr) return {};
    std::string const name = file->address();
    std::lock_guard const hold(made().mutex);
    made().files[name] = std::move(file);
    return name;
  }

  /// Maps the memory and registers it with CUDA. \param name a name that `make` returned
  /// \throws usage_error if the memory cannot be opened, or for too many ranks; c10::Error if CUDA does not register the memory
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

  /// Returns a flag, for the host.
  std::atomic_ref<std::uint32_t> host_flag(flag which, int writer, int waiter) const {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(at(flag_at(which, writer, waiter))));
  }
  /// Returns the address of a flag, for streams.
  void* stream_flag(flag which, int writer, int waiter) const { return seen_ + flag_at(which, writer, waiter); }

  /// Returns the address, for kernels, of the memory for a piece of a rank's part of a gather.
  std::byte* room(int rank) const { return seen_ + rooms_at() + static_cast<std::size_t>(rank) * gather_piece; }

  /// Closes the file: no rank can open the memory afterwards.
  void close() { file_->close(); }

  /// Random digits that identify this process: ranks of one process reach each other's memory without handles.
  static std::string const& process() {
    static std::string const drawn = random_digits(4);
    return drawn;
  }

 private:
  static constexpr std::size_t file_bytes = std::size_t{64} << 20;  // untouched pages take no memory
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
