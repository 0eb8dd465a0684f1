#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>

#include <chevron/run/comm/shared_memory/shared_file.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/random_digits.hpp>

/// \file
/// Memory that the ranks of a channel of copies reach: main memory with flags, which streams write and wait for, and room for
/// gathers; and GPU memory.

namespace chevron::detail {

/// The driver's functions for stream memory operations. CUDA's runtime gives their addresses, so that nothing is linked.
///
/// A stream that waits takes no multiprocessor: the GPU's front end reads the word. Other GPUs and the host see a write after all
/// earlier work of the stream (CUDA driver API, `cuStreamWriteValue32`).
class stream_memory {
 public:
  /// The functions of this process's driver. \throws usage_error if the driver lacks one
  static stream_memory const& of_driver() {
    static stream_memory const one;
    return one;
  }

  /// Checks a GPU. \throws usage_error if its streams cannot wait for memory
  void refuse_without(int gpu) const {
    constexpr auto asked = CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR;
    int can = 0;
    CUresult const result = attribute_(&can, asked, static_cast<CUdevice>(gpu));
    if (result == CUDA_SUCCESS && can != 0) return;
    throw usage_error("GPU " + std::to_string(gpu) + " has no stream memory operations, of which messages by copies are made (" +
                      (result == CUDA_SUCCESS ? "CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR is 0"
                                              : "cuDeviceGetAttribute failed with " + std::to_string(result)) +
                      "). Remedy: nccl_transport, --backend nccl");
  }

  /// Enqueues a write on a stream. \param word its address for the device
  CUresult write(cudaStream_t on, void* word, std::uint32_t value) const {
    return write_(on, address_of(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  /// Makes a stream wait until a word is `value`, or up to 2³¹ - 1 beyond it modulo 2³².
  /// \param flush whether to wait also until earlier writes of other devices can be seen; if the GPU `can_flush`
  CUresult wait(cudaStream_t on, void* word, std::uint32_t value, bool flush = false) const {
    return wait_(on, address_of(word), value, CU_STREAM_WAIT_VALUE_GEQ | (flush ? CU_STREAM_WAIT_VALUE_FLUSH : 0U));
  }
  /// Whether waits on a GPU can flush writes of other devices.
  bool can_flush(int gpu) const {
    int can = 0;
    return attribute_(&can, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, static_cast<CUdevice>(gpu)) == CUDA_SUCCESS && can != 0;
  }

 private:
  using operation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

  stream_memory()
      : write_(function<operation>("cuStreamWriteValue32")),
        wait_(function<operation>("cuStreamWaitValue32")),
        attribute_(function<CUresult (*)(int*, CUdevice_attribute, CUdevice)>("cuDeviceGetAttribute")) {}

  template <class Function>
  static Function function(char const* name) {
    void* out = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t const result = cudaGetDriverEntryPointByVersion(name, &out, 12000, cudaEnableDefault, &found);
#else
    cudaError_t const result = cudaGetDriverEntryPoint(name, &out, cudaEnableDefault, &found);
#endif
    if (result == cudaSuccess && found == cudaDriverEntryPointSuccess && out != nullptr) return reinterpret_cast<Function>(out);
    static_cast<void>(cudaGetLastError());
    throw usage_error(std::string("the NVIDIA driver has no ") + name +
                      " of CUDA 12, of which messages by copies are made. Remedy: a newer driver, or nccl_transport, "
                      "--backend nccl");
  }
  static CUdeviceptr address_of(void* word) { return reinterpret_cast<CUdeviceptr>(word); }

  operation write_, wait_;
  CUresult (*attribute_)(int*, CUdevice_attribute, CUdevice);
};

/// A rank's entry in a channel, read by the other ranks.
struct copy_entry {
  std::atomic<std::uint32_t> ready;  ///< the fields below and the flags that this rank writes are set
  std::atomic<std::uint32_t> ended;  ///< this rank's streams were ended: flags and values that they write later are invalid
  std::atomic<std::uint32_t> left;   ///< this rank no longer reaches the other ranks' memory
  std::array<char, 33> process;      ///< `copy_page::process`, zero-terminated
  std::int32_t device;               ///< this rank's GPU, as its process numbers GPUs
  std::uint32_t first;               ///< initial value of flags
  std::uint64_t piece;               ///< bytes of a piece
  std::uint64_t pieces;              ///< pieces that this rank's memory holds
  std::uint64_t memory;              ///< address of this rank's GPU memory in its process; 0: none
  cudaIpcMemHandle_t handle;         ///< of that memory
};

/// The shared memory of a channel, mapped, and registered with CUDA. Flags lie in main memory, so that the host ends the waits of
/// its streams by a store: a call of CUDA could wait for another call. One rank writes each flag and one rank waits for it, so
/// that a rank which ends its own waits ends no other rank's.
class copy_page {
 public:
  /// Counts of pieces: `here` may be read, `reduced` are summed and may be read, `taken` were read.
  enum class flag : int { here, reduced, taken };
  static constexpr std::size_t gather_piece = std::size_t{16} << 10;
  static constexpr int most_ranks = 1024;

  /// Makes the memory of a channel whose rank 0 is in this process.
  /// \returns its name, for all ranks; empty if the system gives no memory
  static std::string make() {
    auto file = shared_file::make(file_bytes);
    if (file == nullptr) return {};
    std::string const name = file->address();
    std::lock_guard const hold(made().mutex);
    made().files[name] = std::move(file);
    return name;
  }

  /// Maps the memory and registers it with CUDA. \param name by `make`
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

  /// A flag for the host, and its address for streams.
  std::atomic_ref<std::uint32_t> host_flag(flag which, int writer, int waiter) const {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(at(flag_at(which, writer, waiter))));
  }
  void* stream_flag(flag which, int writer, int waiter) const { return seen_ + flag_at(which, writer, waiter); }

  /// The address, for kernels, of the room for a piece of a rank's part of a gather.
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

/// This rank's memory, and the other ranks' memory at addresses of this process: a process opens handles of other processes (CUDA
/// IPC), threads of one process use addresses. A handle is of a whole allocation, so the memory comes from `cudaMalloc`, not from
/// LibTorch's allocator.
class copy_memory {
 public:
  explicit copy_memory(std::shared_ptr<copy_page> page) : page_(std::move(page)) {}
  /// Closes the other ranks' memory. This rank's memory is freed by the first `copy_memory` of the process that is destroyed
  /// after all other ranks have left, since their streams may write to the memory until then.
  ~copy_memory() {
    for (void* const opened : opened_) C10_CUDA_CHECK_WARN(cudaIpcCloseMemHandle(opened));
    page_->mine().left = 1;
    std::lock_guard const hold(lent().mutex);
    if (own_ != nullptr) lent().all.push_back({own_, std::move(page_)});
    free_what_nobody_reaches();
  }
  copy_memory(copy_memory const&) = delete;
  copy_memory& operator=(copy_memory const&) = delete;

  /// Allocates memory of the current GPU, and enters its address and handle for the other ranks; before `copy_entry::ready`.
  void lend(std::size_t bytes) {
    C10_CUDA_CHECK(cudaMalloc(&own_, bytes));
    copy_entry& mine = page_->mine();
    mine.memory = reinterpret_cast<std::uint64_t>(own_);
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&mine.handle, own_));
  }
  std::byte* own() const { return static_cast<std::byte*>(own_); }

  /// The address of another rank's memory for the current GPU. \param rank a rank that is ready \param device the current GPU
  /// \throws usage_error if this GPU cannot reach the memory
  std::byte* reach(int rank, at::Device device) {
    copy_entry const& theirs = page_->of(rank);
    if (copy_page::process() != theirs.process.data()) {
      void* out = nullptr;
      cudaError_t const result = cudaIpcOpenMemHandle(&out, theirs.handle, cudaIpcMemLazyEnablePeerAccess);
      if (result != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        refuse(rank, device, std::string("another process's, cudaIpcOpenMemHandle: ") + cudaGetErrorString(result));
      }
      opened_.push_back(out);
      return static_cast<std::byte*>(out);
    }
    if (theirs.device != device.index()) {
      int can = 0;
      C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device.index(), theirs.device));
      if (can == 0) refuse(rank, device, "cudaDeviceCanAccessPeer says no");
      cudaError_t const result = cudaDeviceEnablePeerAccess(theirs.device, 0);
      if (result != cudaErrorPeerAccessAlreadyEnabled) C10_CUDA_CHECK(result);
      static_cast<void>(cudaGetLastError());
    }
    return reinterpret_cast<std::byte*>(theirs.memory);
  }

 private:
  struct lent_memory {
    void* memory;
    std::shared_ptr<copy_page> page;
  };
  struct lent_by_process {
    std::mutex mutex;
    std::list<lent_memory> all;
  };
  static lent_by_process& lent() {
    static auto* const one = new lent_by_process;  // never destroyed: CUDA may end before static objects do
    return *one;
  }

  /// Frees memory that all ready ranks have left. The caller holds the mutex. A rank that is ready later finds `left` set, and
  /// does not reach the memory (`copy_channel::reach`).
  static void free_what_nobody_reaches() {
    std::erase_if(lent().all, [](lent_memory const& each) {
      for (int r = 0; r < each.page->size(); ++r) {
        if (each.page->of(r).ready != 0 && each.page->of(r).left == 0) return false;
      }
      C10_CUDA_CHECK_WARN(cudaFree(each.memory));
      return true;
    });
  }

  [[noreturn]] void refuse(int rank, at::Device device, std::string const& why) const {
    throw usage_error("GPU " + std::to_string(device.index()) + " cannot reach the memory of GPU " +
                      std::to_string(page_->of(rank).device) + ", rank " + std::to_string(rank) + " of a channel of copies (" +
                      why + "). Remedy: GPUs that nvidia-smi topo -p2p r shows as OK, or nccl_transport, --backend nccl");
  }

  std::shared_ptr<copy_page> page_;
  void* own_ = nullptr;
  std::vector<void*> opened_;
};

}  // namespace chevron::detail
