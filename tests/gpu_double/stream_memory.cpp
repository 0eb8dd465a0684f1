// Stream memory operations of CUDA's driver, and how a program finds them without being linked with it.
#include "gpu_double/double.hpp"
#include "gpu_double/stream.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>
#include <thread>

#include <cuda.h>

namespace {

std::uint32_t* word_of(CUdeviceptr address) { return reinterpret_cast<std::uint32_t*>(address); }

CUresult refused(CUstream stream, CUdeviceptr address) {
  if (gpu_double::is_captured(stream)) {
    gpu_double::waits_for_captured(stream);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  auto const* const word = word_of(address);
  bool const reached = gpu_double::is_pinned(word) || gpu_double::is_of_device(word);
  return reached && address % sizeof(std::uint32_t) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult write_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  if (CUresult const wrong = refused(stream, address); wrong != CUDA_SUCCESS) return wrong;
  gpu_double::enqueue(stream, [address, value] {
    std::atomic_ref(*word_of(address)).store(value);
    // A waiting stream may run before this stream's next operation; the sleep makes that happen at times.
    thread_local std::minstd_rand chance(std::random_device{}());
    if (chance() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
  });
  return CUDA_SUCCESS;
}
// No place of the device is taken: its front end waits.
CUresult wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (CUresult const wrong = refused(stream, address); wrong != CUDA_SUCCESS) return wrong;
  auto const holds = [flags, value](std::uint32_t now) {
    switch (flags & 3U) {
      case CU_STREAM_WAIT_VALUE_EQ:
        return now == value;
      case CU_STREAM_WAIT_VALUE_AND:
        return (now & value) != 0;
      case CU_STREAM_WAIT_VALUE_NOR:
        return ~(now | value) != 0;
      default:
        return static_cast<std::int32_t>(now - value) >= 0;
    }
  };
  gpu_double::enqueue(stream, [address, holds] {
    while (!holds(std::atomic_ref(*word_of(address)).load())) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return CUDA_SUCCESS;
}
CUresult attribute(int* out, CUdevice_attribute which, CUdevice device) {
  if (device < 0 || device >= gpu_double::device_count()) return CUDA_ERROR_INVALID_DEVICE;
  if (which != CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  *out = std::getenv("GPU_DOUBLE_NO_STREAM_MEMORY") == nullptr ? 1 : 0;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** out, unsigned version, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
  std::string_view const name(symbol);
  *out = name == "cuStreamWriteValue32"   ? reinterpret_cast<void*>(write_value)
         : name == "cuStreamWaitValue32"  ? reinterpret_cast<void*>(wait_value)
         : name == "cuDeviceGetAttribute" ? reinterpret_cast<void*>(attribute)
                                          : nullptr;
  // Before CUDA 11.7 the name was another function's, which a setting of the driver turned on.
  bool const there = *out != nullptr && version >= 11070;
  *found = there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return there ? gpu_double::used() : gpu_double::fails(cudaErrorSymbolNotFound);
}
