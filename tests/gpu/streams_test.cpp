// LibTorch's CUDA side works from C++ as the executor needs it: streams, events and an allocator that knows of both.
#include "gpus.hpp"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <c10/cuda/CUDAStream.h>

namespace {

using stream = c10::cuda::CUDAStream;

/// 2 to the power `times`, the long way: enough work that a stream which does not wait is caught.
at::Tensor doubled(int times) {
  auto const on_gpu = at::TensorOptions().device(at::kCUDA);
  // Each product of these matrices is one with 2, 4, 8 … in all places: rows of 2048 numbers of 1/2048.
  at::Tensor value = at::full({2048, 2048}, 1.0, on_gpu);
  at::Tensor const twice = at::full({2048, 2048}, 2.0 / 2048, on_gpu);
  for (int i = 0; i < times; ++i) value = at::matmul(value, twice);
  return value;
}

}  // namespace

TEST_CASE("a tensor made on one stream is used on another, behind an event") {
  if (!gpus::at_least(1)) return;
  stream const maker = c10::cuda::getStreamFromPool();
  stream const user = c10::cuda::getStreamFromPool(/*isHighPriority=*/true);
  REQUIRE(maker != user);
  REQUIRE(maker != c10::cuda::getDefaultCUDAStream());

  at::cuda::CUDAEvent made, used;
  at::Tensor value, sum;
  {
    c10::cuda::CUDAStreamGuard const on(maker);
    value = doubled(10);
    made.record(maker);
  }
  {
    c10::cuda::CUDAStreamGuard const on(user);
    made.block(user);
    sum = (value / 1024).sum();
    c10::cuda::CUDACachingAllocator::recordStream(value.storage().data_ptr(), user);
    used.record(user);
  }
  // Its memory may not be given to anybody before `user` is done with it.
  value.reset();
  {
    c10::cuda::CUDAStreamGuard const on(maker);
    for (int i = 0; i < 4; ++i) at::full({2048, 2048}, -1.0, at::TensorOptions().device(at::kCUDA));
  }
  used.synchronize();
  CHECK(used.query());
  CHECK(sum.item<float>() == 2048.0f * 2048.0f);
}

TEST_CASE("the time between two events is that of the work between them") {
  if (!gpus::at_least(1)) return;
  stream const on = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStreamGuard const guard(on);
  (void)doubled(1);  // the first product of a process loads its library
  on.synchronize();
  auto const time_of = [&](int times) {
    at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    begin.record(on);
    (void)doubled(times);
    end.record(on);
    end.synchronize();
    return begin.elapsed_time(end);
  };
  double const short_one = time_of(10), long_one = time_of(200);
  CHECK(short_one > 0);
  CHECK(long_one > 4 * short_one);
}
