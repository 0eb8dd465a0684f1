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

/// Pauses between two queries of a device's event. Since most events pass soon, pauses in the first 200 µs yield; later pauses
/// sleep for 20 µs, so that other threads can use the core.
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

/// Waits until a device has passed an event, with pauses: `c10::Event::synchronize` would keep the core busy.
inline void wait_for(c10::Event const& event) {
  for (poll_pause const pause; !event.query();) pause();
}

/// Copies a tensor to main memory, after the work queued on the current stream. The host may do other work until `wait`.
///
/// `Tensor::cpu` copies to memory that is not pinned. During such a copy CUDA holds a lock of the driver, so no other thread
/// can create an event or launch a kernel (docs/reference/gpu-runs.md), not even the monitor thread that must end a stream's
/// wait for a lost rank. So this class copies from a CUDA device to pinned memory, and `wait` queries an event.
class async_host_copy {
 public:
  /// Begins the copy. From a device other than CUDA's, which may lack pinned memory, the constructor copies and waits.
  explicit async_host_copy(at::Tensor const& values) {
    if (!values.is_cuda()) {
      there_ = values.cpu();
      return;
    }
    at::Tensor const row = values.contiguous();  // PyTorch copies other strides through memory that is not pinned
    there_ = row.to(at::kCPU, row.scalar_type(), /*non_blocking=*/true);
    copied_.emplace(values.device().type());
    copied_->record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
  }

  /// Waits for the copy. \returns the values in main memory; the tensor itself if it was there
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
