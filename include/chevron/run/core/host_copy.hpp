#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

/// \file
/// Values of an accelerator, read by the host.

namespace chevron {

/// Copies a tensor to main memory, behind the work of the thread's current stream, and waits for the copy.
///
/// `Tensor::cpu` copies to memory that is not pinned. CUDA's call for such a copy returns when the copy is done, and holds the
/// driver's lock on the GPU until then: no other thread of the process can launch or query anything. A stream that waits for a
/// message of a rank of the same process would then wait for ever, and the monitor of a lost rank could not end the wait (both
/// ranks were seen inside the driver on an H200, driver 580). Here the destination is pinned, and the host waits outside that
/// lock.
/// \returns `values` itself where they are in main memory
inline at::Tensor host_copy(at::Tensor const& values) {
  if (values.is_cpu()) return values;
  at::Tensor const there = values.to(at::kCPU, values.scalar_type(), /*non_blocking=*/true);
  c10::impl::VirtualGuardImpl const device(values.device().type());
  device.synchronizeStream(device.getStream(values.device()));
  return there;
}

}  // namespace chevron
