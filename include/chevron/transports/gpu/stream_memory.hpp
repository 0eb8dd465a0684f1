#pragma once

#include <cstdint>
#include <string>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chevron/run/core/error.hpp>

/// \file
/// Stream memory operations: a stream writes a number into a word of memory, or waits until a word holds a number.

namespace chevron::detail {

/// The driver's functions for stream memory operations. CUDA's runtime returns their addresses, so that programs need not link
/// the driver.
///
/// A waiting stream occupies no multiprocessor: the GPU's front end reads the word. Other GPUs and the host see a write after
/// all earlier work of the stream (CUDA driver API, `cuStreamWriteValue32`).
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

  /// Enqueues a write on a stream. \param word the word's address for the device
  CUresult write(cudaStream_t on, void* word, std::uint32_t value) const {
    return write_(on, address_of(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  /// Makes a stream wait until a word is `value`, or larger by up to 2³¹ - 1, modulo 2³².
  /// \param flush whether to wait also until earlier writes of other devices are visible; allowed if the GPU `can_flush`
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

}  // namespace chevron::detail
