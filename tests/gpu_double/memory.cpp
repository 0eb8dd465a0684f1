// CUDA's memory: of devices, pinned, and reached from other devices and processes. All of it is main memory; each block of a
// device is a file in memory, so that another process can map it.
#include "gpu_double/double.hpp"
#include "gpu_double/stream.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace {

constexpr std::size_t page = 4096;

struct block {
  int device;
  std::size_t bytes;   // as given out
  std::size_t mapped;  // with a page behind it, in which other processes count themselves
  int file;
  bool lent = false;  // a handle of it was given out
};
std::atomic<int>& openers(void* memory, std::size_t mapped) {
  return *reinterpret_cast<std::atomic<int>*>(static_cast<char*>(memory) + mapped - page);
}

/// Of the process. Never destroyed: streams may run until the very end.
struct state {
  std::mutex mutex;
  std::map<char const*, std::size_t> pinned;
  std::map<void*, block> memory;
  std::map<void*, std::size_t> opened;  // other processes'; how much is mapped
  std::set<std::pair<int, int>> peers;  // a device that reaches another one's memory
  std::array<std::size_t, 16> taken{};
  std::size_t limit = gpu_double::card;
};
state& all() {
  static auto* const one = new state;
  return *one;
}

/// The content of a handle of CUDA IPC.
struct handle_words {
  int process, file, device;
  std::size_t mapped;
};
static_assert(sizeof(handle_words) <= sizeof(cudaIpcMemHandle_t));

bool peers_reach_each_other() { return std::getenv("GPU_DOUBLE_NO_PEERS") == nullptr; }

/// The block that an address lies in; the caller holds the mutex.
auto block_of(void const* address) {
  auto after = all().memory.upper_bound(const_cast<void*>(address));
  if (after == all().memory.begin()) return all().memory.end();
  --after;
  return static_cast<char const*>(address) < static_cast<char*>(after->first) + after->second.bytes ? after : all().memory.end();
}

}  // namespace

namespace gpu_double {

std::size_t limit_memory(std::size_t bytes) {
  std::lock_guard const hold(all().mutex);
  return std::exchange(all().limit, bytes);
}

bool is_pinned(void const* address) {
  std::lock_guard const hold(all().mutex);
  auto const* const at = static_cast<char const*>(address);
  auto after = all().pinned.upper_bound(at);
  if (after == all().pinned.begin()) return false;
  --after;
  return at < after->first + after->second;
}
bool is_of_device(void const* address) {
  std::lock_guard const hold(all().mutex);
  return block_of(address) != all().memory.end();
}
void pin(void const* begin, std::size_t bytes) {
  std::lock_guard const hold(all().mutex);
  all().pinned[static_cast<char const*>(begin)] = bytes;
}
void unpin(void const* begin) {
  std::lock_guard const hold(all().mutex);
  all().pinned.erase(static_cast<char const*>(begin));
}
int lent_blocks() {
  std::lock_guard const hold(all().mutex);
  return static_cast<int>(
      std::count_if(all().memory.begin(), all().memory.end(), [](auto const& each) { return each.second.lent; }));
}
int pinned_blocks() {
  std::lock_guard const hold(all().mutex);
  return static_cast<int>(all().pinned.size());
}

}  // namespace gpu_double

using gpu_double::fails, gpu_double::unsafe, gpu_double::used;

extern "C" {

cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  std::size_t const whole = (bytes + 511) / 512 * 512, mapped = (whole + page - 1) / page * page + page;
  std::lock_guard const hold(all().mutex);
  std::size_t& taken = all().taken[static_cast<std::size_t>(gpu_double::current_device())];
  if (taken + whole > all().limit) return fails(cudaErrorMemoryAllocation);
  int const file = ::memfd_create("gpu-double", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(mapped)) != 0) return fails(cudaErrorMemoryAllocation);
  void* const memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) return fails(cudaErrorMemoryAllocation);
  *out = memory;
  taken += whole;
  all().memory[*out] = {gpu_double::current_device(), whole, mapped, file};
  return used();
}
// "cudaFree … may synchronize": it does, and so waits for kernels that wait for other ranks (CUDA C++ programming guide,
// "Implicit synchronization").
cudaError_t cudaFree(void* memory) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  if (memory == nullptr) return used();
  block of{};
  {
    std::lock_guard const hold(all().mutex);
    auto const found = all().memory.find(memory);
    if (found == all().memory.end()) return fails(cudaErrorInvalidValue);
    of = found->second;
    all().memory.erase(found);
  }
  if (openers(memory, of.mapped) != 0)
    gpu_double::broken("memory is freed that another process has open", "CUDA runtime API, cudaIpcOpenMemHandle");
  gpu_double::drain_device(of.device);
  ::munmap(memory, of.mapped);
  ::close(of.file);
  std::lock_guard const hold(all().mutex);
  all().taken[static_cast<std::size_t>(of.device)] -= of.bytes;
  return used();
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  std::lock_guard const hold(all().mutex);
  std::size_t const taken = all().taken[static_cast<std::size_t>(gpu_double::current_device())];
  *total = all().limit;
  *free = all().limit - std::min(all().limit, taken);
  return used();
}

// ---- Main memory that devices reach -----------------------------------------------------------------------------------------

cudaError_t cudaHostRegister(void* begin, std::size_t bytes, unsigned) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  gpu_double::pin(begin, bytes);
  return used();
}
cudaError_t cudaHostUnregister(void* begin) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  std::lock_guard const hold(all().mutex);
  return all().pinned.erase(static_cast<char const*>(begin)) == 1 ? used() : fails(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** out, void* begin, unsigned) {
  *out = begin;
  return gpu_double::is_pinned(begin) ? used() : fails(cudaErrorInvalidValue);
}

// ---- Memory of other devices and processes ----------------------------------------------------------------------------------

cudaError_t cudaDeviceCanAccessPeer(int* can, int from, int to) {
  *can = from != to && peers_reach_each_other() ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  int const me = gpu_double::current_device();
  if (peer == me) return fails(cudaErrorInvalidDevice);
  if (!peers_reach_each_other()) return fails(cudaErrorPeerAccessUnsupported);
  std::lock_guard const hold(all().mutex);
  return all().peers.insert({me, peer}).second ? used() : fails(cudaErrorPeerAccessAlreadyEnabled);
}

// A handle is of the whole allocation, wherever in it the address lies.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* memory) {
  std::lock_guard const hold(all().mutex);
  auto const found = block_of(memory);
  if (found == all().memory.end()) return fails(cudaErrorInvalidValue);
  block& of = found->second;
  of.lent = true;
  handle_words const words{::getpid(), of.file, of.device, of.mapped};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &words, sizeof words);
  return used();
}
cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned) {
  handle_words words{};
  std::memcpy(&words, &handle, sizeof words);
  // A process cannot open a handle of its own memory.
  if (words.process == ::getpid()) return fails(cudaErrorDeviceUninitialized);
  if (words.device != gpu_double::current_device() && !peers_reach_each_other()) return fails(cudaErrorPeerAccessUnsupported);
  std::string const path = "/proc/" + std::to_string(words.process) + "/fd/" + std::to_string(words.file);
  int const file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return fails(cudaErrorInvalidValue);
  void* const memory = ::mmap(nullptr, words.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory == MAP_FAILED) return fails(cudaErrorMapBufferObjectFailed);
  ++openers(memory, words.mapped);
  *out = memory;
  std::lock_guard const hold(all().mutex);
  all().opened[memory] = words.mapped;
  return used();
}
// Waits for the device's work, as freeing does.
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  std::size_t mapped = 0;
  {
    std::lock_guard const hold(all().mutex);
    auto const found = all().opened.find(memory);
    if (found == all().opened.end()) return fails(cudaErrorInvalidValue);
    mapped = found->second;
    all().opened.erase(found);
  }
  gpu_double::drain_device(gpu_double::current_device());
  --openers(memory, mapped);
  ::munmap(memory, mapped);
  return used();
}
}
