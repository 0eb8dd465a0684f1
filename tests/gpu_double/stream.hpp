#pragma once

// Streams, events and captures from inside: of the files that stand in for CUDA's runtime.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

namespace gpu_double {

/// Work that a capture noted.
struct node {
  std::function<void()> work;
  std::vector<std::size_t> after;  // nodes before it
};
using graph = std::vector<node>;

/// From cudaStreamBeginCapture to cudaStreamEndCapture. Guarded by `captures()`.
struct capture {
  unsigned long long id = 0;
  cudaStream_t origin = nullptr;
  std::thread::id owner;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool invalid = false, ended = false;
  graph nodes;
  std::vector<cudaStream_t> joined;  // beside the origin
};
std::mutex& captures();

/// One record of an event: later ones are others.
struct mark {
  bool passed = false;
  std::chrono::steady_clock::time_point when;
  std::shared_ptr<capture> within;  // recorded on a stream that was captured
  std::vector<std::size_t> after;   // the nodes before it
};

/// Whether the calling thread may make a call that CUDA allows to no thread that captures; a capture that forbids it is invalid
/// from now on.
cudaError_t unsafe();
/// The capture that a stream is part of; null if of none.
std::shared_ptr<capture> capture_of(cudaStream_t stream);
/// Stores an error for cudaGetLastError, and returns it.
cudaError_t fails(cudaError_t how);
/// The first use of CUDA by a process; an error in a child of one that had used it.
cudaError_t initialised();
/// The same, by a call that needs a context on the current device.
cudaError_t used();
int device_count();
int current_device();
/// Bytes of a device.
inline constexpr std::size_t card = std::size_t{8} << 30;

}  // namespace gpu_double

struct CUstream_st {
  explicit CUstream_st(int of, int comes = 0) : device(of), priority(comes) {}
  int const device, priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> asked;
  bool busy = false, has_thread = false;
  std::shared_ptr<gpu_double::capture> part_of;  // guarded by captures(), as is
  std::vector<std::size_t> last;                 // the nodes that come before its next

  void run();
};

struct CUevent_st {
  explicit CUevent_st(int of) : device(of) {}
  int const device;
  std::mutex mutex;
  std::shared_ptr<gpu_double::mark> last;
};

namespace gpu_double {
/// The stream of a handle: the legacy one of the current device where it is null.
CUstream_st& stream_of(cudaStream_t stream);
}  // namespace gpu_double
