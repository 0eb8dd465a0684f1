#pragma once

// GPUs and NCCL that are not there: the functions of both that Chevron and LibTorch's c10_cuda call, in place of the real ones,
// on the CPU (device.cpp, memory.cpp, streams.cpp, stream_memory.cpp, graphs.cpp, nccl.cpp). They allow
// and wait as CUDA's and NCCL's documentation says; a program that breaks a rule ends at once with `rule_broken` and the rule.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

namespace gpu_double {

/// The exit status of a program that broke a rule.
inline constexpr int rule_broken = 97;

/// Ends the process and says which rule was broken, and where the rule stands.
[[noreturn]] void broken(std::string const& rule, std::string const& source);

/// Enqueues work on a stream; on a captured stream, adds the work to the graph.
void enqueue(cudaStream_t stream, std::function<void()> work);
/// Waits on the host until a stream has done all its work; `drain_device`: all streams of a device, of this process.
void drain(cudaStream_t stream);
/// The same inside a call that copies to memory that is not pinned: no other thread can ask for anything on the device until then
/// (seen on an H200, driver 580).
void drain_within_call(cudaStream_t stream);
void drain_device(int device);
void drain_all();

/// Blocks of threads that a GPU holds at a time, one on each of its processors: a kernel begins when all of its blocks have a
/// place, and keeps them until it ends (CUDA programming guide, "Hardware implementation").
inline constexpr int places = 132;
/// Waits for so many places on a device; false where `give_up` became true first. Of kernels that wait, those of streams with the
/// greatest priority, which is the least number, begin first ("Stream priorities"); of these, whichever fits and came first.
bool take_places(
    int device, int blocks, std::function<bool()> const& give_up = [] { return false; }, int priority = 0);
void leave_places(int device, int blocks);
/// How many kernels wait for places.
int kernels_without_places(int device);

/// The device and the priority of a stream.
int device_of(cudaStream_t stream);
int priority_of(cudaStream_t stream);
/// The result of a kernel launch on a stream: a stream belongs to the device that was current when the stream was made, and a
/// launch fails while another device is current (CUDA programming guide, "Stream and event behavior").
cudaError_t may_launch(cudaStream_t stream);

/// Whether this process has a context on a device. A context takes memory (530 MiB on an H200); the first call that needs one
/// makes it, on the device that is current in the calling thread.
bool has_context(int device);

/// Whether a stream is captured: its work is recorded, and runs when the graph is launched.
bool is_captured(cudaStream_t stream);
/// The host would wait for a stream that is captured: the capture is invalid from now on.
cudaError_t waits_for_captured(cudaStream_t stream);

/// Registers the parts of a CUDA build that LibTorch needs, without libtorch_cuda: operators compute on the CPU, after all
/// earlier work of the current stream (libtorch.cpp). To be called once in a process.
void install();

/// Memory that CUDA would copy from without a stop on the way.
bool is_pinned(void const* address);
/// Memory that cudaMalloc gave to this process.
bool is_of_device(void const* address);
void pin(void const* begin, std::size_t bytes);
void unpin(void const* begin);

/// How many pieces of cudaMalloc's memory have a handle for other processes and are not freed; how many pieces are pinned.
int lent_blocks();
int pinned_blocks();

/// Bytes that cudaMalloc gives out at most on each device; 8 GiB if never called. Returns the previous limit.
std::size_t limit_memory(std::size_t bytes);

/// A fault of NCCL from now on in this process.
enum class fault {
  none,
  kernel_hangs,  ///< the next kernel runs for ever: a peer was lost, and no connection says so
  call_hangs,    ///< the next call never comes back
  remote_error,  ///< NCCL notes ncclRemoteError on the communicator of the next kernel, which runs for ever
  system_error,  ///< the next call fails with ncclSystemError
};
void arm(fault next);
/// Lets the next call of a function of NCCL on one device fail in this process.
/// \param function `ncclSend` …, or `ncclCommGetAsyncError on <channel>`, an error of that communicator
/// \param result an ncclResult_t
/// \param text what ncclGetLastError says from then on \param device the calling thread's current one; -1: any
void fail_next(std::string const& function, int result, std::string const& text, int device);
/// The planned result of this call; 0: none is planned.
int planned(std::string const& function);

/// How many communicators are joined and not yet destroyed or aborted; how many kernels run.
int communicators();
int kernels();
/// Of these communicators: the name, and the most blocks of a kernel.
struct channel {
  std::string name;
  int blocks = 0;
};
std::vector<channel> channels();

}  // namespace gpu_double
