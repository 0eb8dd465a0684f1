// CUDA's devices and their places, as far as Chevron and c10_cuda use them.
#include "gpu_double/double.hpp"
#include "gpu_double/stream.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

namespace {

constexpr int most_devices = 16;

/// Of the process. Never destroyed: streams may run until the very end.
struct state {
  std::mutex mutex;
  std::condition_variable left;  // places
  std::array<int, most_devices> blocks{};
  // Kernels that wait for places, by priority and order of arrival: how many each needs.
  std::array<std::map<std::pair<int, std::uint64_t>, int>, most_devices> waiting;
  std::uint64_t arrived = 0;
  std::array<std::atomic<pid_t>, most_devices> contexts{};  // the process that has one
  std::atomic<pid_t> user{0};
};
state& all() {
  static auto* const one = new state;
  return *one;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

namespace gpu_double {

void broken(std::string const& rule, std::string const& source) {
  std::fprintf(stderr, "rule broken: %s (%s)\n", rule.c_str(), source.c_str());
  std::fflush(stderr);
  ::_exit(rule_broken);
}

int device_count() {
  char const* const told = std::getenv("GPU_DOUBLE_COUNT");
  return told == nullptr ? 8 : std::atoi(told);
}
int current_device() { return device_of_thread; }

cudaError_t fails(cudaError_t how) {
  last_error = how;
  return how;
}

/// CUDA programming guide, "Multi-process": a context does not survive a fork.
cudaError_t initialised() {
  pid_t nobody = 0;
  pid_t const me = ::getpid();
  if (all().user.compare_exchange_strong(nobody, me) || nobody == me) return cudaSuccess;
  return fails(cudaErrorInitializationError);
}
cudaError_t used() {
  all().contexts[static_cast<std::size_t>(device_of_thread)] = ::getpid();
  return initialised();
}
bool has_context(int device) { return all().contexts[static_cast<std::size_t>(device)] == ::getpid(); }

bool take_places(int device, int blocks, std::function<bool()> const& give_up, int priority) {
  std::unique_lock hold(all().mutex);
  int& held = all().blocks[static_cast<std::size_t>(device)];
  auto& waiting = all().waiting[static_cast<std::size_t>(device)];
  auto const mine = waiting.emplace(std::pair(priority, all().arrived++), blocks).first;
  auto const comes_next = [&] {
    return held + blocks <= places && std::all_of(waiting.begin(), mine, [&](auto const& before) {
             return before.first.first == priority && held + before.second > places;
           });
  };
  bool gives_up = false;
  while (!gives_up && !comes_next()) {
    all().left.wait_for(hold, std::chrono::milliseconds(1));
    gives_up = give_up();
  }
  waiting.erase(mine);
  all().left.notify_all();
  if (!gives_up) held += blocks;
  return !gives_up;
}
int kernels_without_places(int device) {
  std::lock_guard const hold(all().mutex);
  return static_cast<int>(all().waiting[static_cast<std::size_t>(device)].size());
}
void leave_places(int device, int blocks) {
  std::lock_guard const hold(all().mutex);
  all().blocks[static_cast<std::size_t>(device)] -= blocks;
  all().left.notify_all();
}

}  // namespace gpu_double

using gpu_double::fails, gpu_double::initialised, gpu_double::unsafe, gpu_double::used;

extern "C" {

// ---- Devices ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu_double::device_count();
  return *count == 0 ? fails(cudaErrorNoDevice) : initialised();
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return initialised();
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpu_double::device_count()) return fails(cudaErrorInvalidDevice);
  // The first use of a GPU makes a context, which takes memory: seen on an H200 whose MPS had three clients of 32 queues.
  if (std::getenv("GPU_DOUBLE_NO_CONTEXT") != nullptr) return fails(cudaErrorMemoryAllocation);
  device_of_thread = device;
  return used();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  *out = {};
  std::snprintf(out->name, sizeof out->name, "a GPU that is not there");
  out->major = 9;
  out->multiProcessorCount = gpu_double::places;
  out->totalGlobalMem = gpu_double::card;
  return initialised();
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int bytes, int device) {
  std::snprintf(out, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device);
  return initialised();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return used();
}
cudaError_t cudaDeviceSynchronize() {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  gpu_double::drain_device(device_of_thread);
  return used();
}

// ---- Errors -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
char const* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return "an error of the double";
  }
}
char const* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheDouble"; }
}
