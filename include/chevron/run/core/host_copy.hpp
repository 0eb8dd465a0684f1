#pragma once

#include <chrono>
#include <thread>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

/// \file
/// Copies an accelerator's values to the host.

namespace chevron {

/// Pauses between two queries of a device's event. Most events pass soon, so the first 200 µs of pauses yield; later pauses
/// sleep, so that a waiting rank leaves its core to others.
class poll_pause {
 public:
  void operator()() const {
    clock::now() - begun_ < std::chrono::microseconds(200) ? std::this_thread::yield()
                                                           : std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point begun_ = clock::now();
};

/// Copies a tensor to main memory, behind the work of the thread's current stream, and waits for the copy.
///
/// `Tensor::cpu` copies to memory that is not pinned. CUDA's call for such a copy returns when the copy is done, and until then
/// holds a lock of the driver: other threads of the process then wait to make an event or to launch a kernel (stacks of rank
/// threads on an H200, driver 580, docs/gpu-runs.md). The monitor that has to end the stream's wait for a lost rank is such a
/// thread. So a copy from a CUDA device goes to pinned memory, and the host queries an event.
/// \returns `values` itself if they are in main memory
inline at::Tensor host_copy(at::Tensor const& values) {
  if (!values.is_cuda()) return values.cpu();  // other devices may lack pinned memory
  at::Tensor const row = values.contiguous();  // a copy of other strides goes through memory that is not pinned
  at::Tensor const there = row.to(at::kCPU, row.scalar_type(), /*non_blocking=*/true);
  c10::Event copied(values.device().type());
  copied.record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
  for (poll_pause const pause; !copied.query();) pause();
  return there;
}

}  // namespace chevron
