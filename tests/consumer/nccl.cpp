// The GPU side: CUDA's and NCCL's headers are found, compile and link, and the program starts, be there a GPU or not.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/version.hpp>

#include <cstdio>
#include <string>

int main() {
  int nccl = 0;
  if (ncclGetVersion(&nccl) != ncclSuccess || nccl / 10000 != NCCL_MAJOR) return 1;
  auto const found = chevron::look_for_cuda_devices();
  if (auto const why = chevron::why_no_cuda_device(found); !why.empty()) {
    std::printf("chevron %s: no GPU, %s\n", chevron::version, why.c_str());
    return 0;
  }
  c10::cuda::CUDAStream const stream = c10::cuda::getStreamFromPool();
  c10::cuda::setCurrentCUDAStream(stream);
  at::cuda::CUDAEvent done;
  at::Tensor const three = at::ones({3}, at::kCUDA).sum();
  done.record(stream);
  done.synchronize();
  std::printf("chevron %s: %d GPUs, sum %.0f\n", chevron::version, found.count, three.item<double>());
}
