#pragma once

#include <chrono>
#include <optional>
#include <thread>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

/// \file
/// Copies an accelerator's values to the host.

namespace chevron::detail {

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

/// Waits until a device has passed an event. `c10::Event::synchronize` would hold the core.
inline void wait_for(c10::Event const& event) {
  for (poll_pause const pause; !event.query();) pause();
}

/// A copy of a tensor to main memory, behind the work of the thread's current stream. The host may do other work until `wait`.
///
/// `Tensor::cpu` copies to memory that is not pinned. Until such a copy is done CUDA's call holds a lock of the driver, and other
/// threads, such as the monitor that has to end the stream's wait for a lost rank, wait to make an event or to launch a kernel
/// (docs/gpu-runs.md). So a copy from a CUDA device goes to pinned memory, and the host queries an event.
class async_host_copy {
 public:
  /// Begins the copy; for a device other than CUDA's, which may lack pinned memory, the copy is done here.
  explicit async_host_copy(at::Tensor const& values) {
    if (!values.is_cuda()) {
      there_ = values.cpu();
      return;
    }
    at::Tensor const row = values.contiguous();  // a copy of other strides goes through memory that is not pinned
    there_ = row.to(at::kCPU, row.scalar_type(), /*non_blocking=*/true);
    copied_.emplace(values.device().type());
    copied_->record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
  }

  /// Waits for the copy. \returns the values in main memory; a tensor in main memory itself
  at::Tensor wait() const {
    if (copied_) wait_for(*copied_);
    return there_;
  }

 private:
  at::Tensor there_;
  std::optional<c10::Event> copied_;
};

/// Copies a tensor to main memory and waits for the copy. \returns `values` itself if they are in main memory
inline at::Tensor host_copy(at::Tensor const& values) { return async_host_copy(values).wait(); }

}  // namespace chevron::detail
