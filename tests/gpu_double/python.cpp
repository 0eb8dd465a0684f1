// The double in a process of Python, whose torch has loaded libtorch_cuda: its hooks, allocators and generators stay, and call
// the double's functions in place of CUDA's; operators are the double's.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>

#include "gpu_double/double.hpp"
#include "gpu_double/libtorch.hpp"
#include "gpu_double/stream.hpp"

// libtorch_cuda's part of c10_cuda, which no header declares.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*ask)(DeviceIndex));
}

/// A generator with a seed of the device's seed and offset, as each of CUDA's kernels draws from its own part of the sequence.
std::optional<at::Generator> gpu_double::host_generator(at::Generator const& given, c10::DeviceIndex device) {
  at::Generator of = given.defined() ? given : at::globalContext().defaultGenerator({at::kCUDA, device});
  std::lock_guard const hold(of.mutex());
  std::uint64_t const offset = of.get_offset();
  of.set_offset(offset + 4);  // a multiple of four, as CUDA's generator asks
  return at::make_generator<at::CPUGeneratorImpl>(of.current_seed() + offset * 0x9e3779b97f4a7c15ULL);
}

extern "C" {

/// Called once, after torch was imported: the newest kernel of an operator counts.
void gpu_double_install() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex device) { return gpu_double::has_context(device); });
  gpu_double::register_operators();
}
/// Whether this process has a context on a device.
int gpu_double_has_context(int device) { return gpu_double::has_context(device) ? 1 : 0; }
/// How many communicators of NCCL are joined, and not yet destroyed or aborted.
int gpu_double_communicators() { return gpu_double::communicators(); }
/// Enqueues a wait, and then a write of `value` to so many numbers.
void gpu_double_fill_late(float* numbers, long count, float value, int milliseconds, cudaStream_t stream) {
  gpu_double::enqueue(stream, [=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    std::fill_n(numbers, count, value);
  });
}

// Functions of CUDA's runtime that libtorch_cuda calls, and LibTorch without it does not.

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if ((*memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)) == nullptr) return cudaErrorMemoryAllocation;
  gpu_double::pin(*memory, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  gpu_double::unpin(memory);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, void const* address) {
  *out = {};
  out->type = gpu_double::is_of_device(address) ? cudaMemoryTypeDevice
              : gpu_double::is_pinned(address)  ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// The driver's functions that libtorch_cuda, and Chevron, look up in libcuda.so.1, which is this library's name.

CUresult cuDeviceGetCount(int* count) {
  *count = gpu_double::device_count();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = gpu_double::has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}
}
