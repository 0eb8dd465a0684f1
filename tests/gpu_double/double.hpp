#pragma once

// GPUs and NCCL that are not there: the functions of both that Chevron and LibTorch's c10_cuda call, in place of the real ones,
// on the CPU (cuda.cpp, nccl.cpp). What they allow and what they make wait is what CUDA's and NCCL's documentation says; a
// program that breaks a rule ends at once with `rule_broken` and the rule.

#include <cstddef>
#include <functional>
#include <string>

#include <cuda_runtime_api.h>

namespace gpu_double {

/// The exit status of a program that broke a rule.
inline constexpr int rule_broken = 97;

/// Ends the process and says which rule was broken, and where the rule stands.
[[noreturn]] void broken(std::string const& rule, std::string const& source);

/// Puts work on a stream, behind what it was given before.
void enqueue(cudaStream_t stream, std::function<void()> work);
/// The host waits until a stream has done what it was given; every stream of this process.
void drain(cudaStream_t stream);
void drain_all();

/// Registers what LibTorch needs of a CUDA build, without libtorch_cuda: operators compute on the CPU when all that was put on
/// the current stream before is done (libtorch.cpp). Once in a process.
void install();

/// Memory that CUDA would copy from without a stop on the way.
bool is_pinned(void const* address);
void pin(void const* begin, std::size_t bytes);
void unpin(void const* begin);

/// What NCCL does wrong from now on in this process.
enum class fault {
  none,
  kernel_hangs,  ///< the next kernel runs for ever: a peer was lost, and no connection says so
  call_hangs,    ///< the next call never comes back
  remote_error,  ///< NCCL notes ncclRemoteError on the communicator of the next kernel, which runs for ever
  system_error,  ///< the next call fails with ncclSystemError
};
void arm(fault next);

/// How many communicators are joined and not yet destroyed or aborted; how many kernels run.
int communicators();
int kernels();

}  // namespace gpu_double
