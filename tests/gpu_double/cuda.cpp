// CUDA's runtime, as far as Chevron and c10_cuda call it. A stream is a thread; memory is main memory.
#include "gpu_double/double.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> asked;
  bool busy = false, has_thread = false;

  void run() {
    std::unique_lock hold(mutex);
    while (true) {
      changed.wait(hold, [&] { return !asked.empty(); });
      auto const work = std::move(asked.front());
      asked.pop_front();
      busy = true;
      hold.unlock();
      work();
      hold.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

namespace {

/// One record of an event: later ones are others.
struct mark {
  bool passed = false;
  std::chrono::steady_clock::time_point when;
};

/// Of the process. Never destroyed: streams may run until the very end.
struct state {
  std::mutex mutex;
  std::condition_variable passed;  // of marks
  std::vector<CUstream_st*> streams;
  std::map<char const*, std::size_t> pinned;
  CUstream_st legacy;
  std::atomic<pid_t> user{0};
};
state& all() {
  static auto* const one = new state;
  return *one;
}

int device_count() {
  char const* const told = std::getenv("GPU_DOUBLE_COUNT");
  return told == nullptr ? 8 : std::atoi(told);
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fails(cudaError_t how) {
  last_error = how;
  return how;
}

/// CUDA programming guide, "Multi-process": a context does not survive a fork.
cudaError_t used() {
  pid_t nobody = 0;
  pid_t const me = ::getpid();
  if (all().user.compare_exchange_strong(nobody, me) || nobody == me) return cudaSuccess;
  return fails(cudaErrorInitializationError);
}

CUstream_st& stream_of(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread ? all().legacy : *stream;
}

std::shared_ptr<mark> last_of(cudaEvent_t event);

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<mark> last;
};

namespace {

std::shared_ptr<mark> last_of(cudaEvent_t event) {
  std::lock_guard const hold(event->mutex);
  return event->last;
}

}  // namespace

namespace gpu_double {

void broken(std::string const& rule, std::string const& source) {
  std::fprintf(stderr, "rule broken: %s (%s)\n", rule.c_str(), source.c_str());
  std::fflush(stderr);
  ::_exit(rule_broken);
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  CUstream_st& s = stream_of(stream);
  std::lock_guard const hold(s.mutex);
  if (!std::exchange(s.has_thread, true)) {
    {
      std::lock_guard const list(all().mutex);
      all().streams.push_back(&s);
    }
    std::thread([&s] { s.run(); }).detach();
  }
  s.asked.push_back(std::move(work));
  s.changed.notify_all();
}

void drain(cudaStream_t stream) {
  CUstream_st& s = stream_of(stream);
  std::unique_lock hold(s.mutex);
  s.changed.wait(hold, [&] { return s.asked.empty() && !s.busy; });
}

void drain_all() {
  std::vector<CUstream_st*> streams;
  {
    std::lock_guard const list(all().mutex);
    streams = all().streams;
  }
  for (CUstream_st* const s : streams) drain(s);
}

bool is_pinned(void const* address) {
  std::lock_guard const hold(all().mutex);
  auto const* const at = static_cast<char const*>(address);
  auto after = all().pinned.upper_bound(at);
  if (after == all().pinned.begin()) return false;
  --after;
  return at < after->first + after->second;
}
void pin(void const* begin, std::size_t bytes) {
  std::lock_guard const hold(all().mutex);
  all().pinned[static_cast<char const*>(begin)] = bytes;
}
void unpin(void const* begin) {
  std::lock_guard const hold(all().mutex);
  all().pinned.erase(static_cast<char const*>(begin));
}

}  // namespace gpu_double

using gpu_double::enqueue;

extern "C" {

// ---- Devices ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count == 0 ? fails(cudaErrorNoDevice) : used();
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return used();
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fails(cudaErrorInvalidDevice);
  current_device = device;
  return used();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  *out = {};
  std::snprintf(out->name, sizeof out->name, "a GPU that is not there");
  out->major = 9;
  out->multiProcessorCount = 132;
  out->totalGlobalMem = std::size_t{8} << 30;
  return used();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return used();
}
cudaError_t cudaDeviceSynchronize() {
  gpu_double::drain_all();
  return used();
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{8} << 30;
  return used();
}

// ---- Errors -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess         ? "no error"
         : error == cudaErrorNoDevice ? "no CUDA-capable device is detected"
                                      : "an error of the double";
}
char const* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheDouble"; }

// ---- Memory -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  *out = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return used();
}
// "cudaFree … may synchronize": it does, and so waits for kernels that wait for other ranks (CUDA C++ programming guide,
// "Implicit synchronization").
cudaError_t cudaFree(void* memory) {
  gpu_double::drain_all();
  std::free(memory);
  return used();
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  bool const reads_host = kind == cudaMemcpyHostToDevice, writes_host = kind == cudaMemcpyDeviceToHost;
  // Memory that is not pinned goes through a buffer: the call comes back when the copy no longer needs it ("API synchronization
  // behavior" of the runtime's reference).
  if (reads_host && !gpu_double::is_pinned(from)) {
    auto const kept = std::make_shared<std::vector<char>>(static_cast<char const*>(from), static_cast<char const*>(from) + bytes);
    enqueue(stream, [to, kept] { std::memcpy(to, kept->data(), kept->size()); });
    return used();
  }
  enqueue(stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
  if (writes_host && !gpu_double::is_pinned(to)) gpu_double::drain(stream);
  return used();
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  gpu_double::drain(nullptr);
  return cudaSuccess;
}

// ---- Streams ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  *out = new CUstream_st;
  return used();
}
// "The function will return immediately and the resources associated with stream will be released automatically once the device
// has completed all work": here they stay.
cudaError_t cudaStreamDestroy(cudaStream_t) { return used(); }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CUstream_st& s = stream_of(stream);
  std::lock_guard const hold(s.mutex);
  return s.asked.empty() && !s.busy ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  gpu_double::drain(stream);
  return used();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
                                     cudaGraphNode_t const**, cudaGraphEdgeData const**, std::size_t*) {
  *out = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- Events -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = new CUevent_st;
  return used();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return used();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto const now = std::make_shared<mark>();
  {
    std::lock_guard const hold(event->mutex);
    event->last = now;
  }
  enqueue(stream, [now] {
    std::lock_guard const hold(all().mutex);
    now->passed = true;
    now->when = std::chrono::steady_clock::now();
    all().passed.notify_all();
  });
  return used();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto const asked = last_of(event);
  if (asked == nullptr) return used();  // never recorded: done
  enqueue(stream, [asked] {
    std::unique_lock hold(all().mutex);
    all().passed.wait(hold, [&] { return asked->passed; });
  });
  return used();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto const asked = last_of(event);
  std::lock_guard const hold(all().mutex);
  return asked == nullptr || asked->passed ? cudaSuccess : fails(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto const asked = last_of(event);
  std::unique_lock hold(all().mutex);
  all().passed.wait(hold, [&] { return asked == nullptr || asked->passed; });
  return used();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  auto const a = last_of(from), b = last_of(to);
  std::lock_guard const hold(all().mutex);
  if (a == nullptr || b == nullptr || !a->passed || !b->passed) return fails(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(b->when - a->when).count();
  return cudaSuccess;
}
}
