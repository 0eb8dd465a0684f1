#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/MemoryFormat.h>

#include <chevron/run/model/stage.hpp>

/// \file
/// Snapshots of modules' buffers, so that forwards can be run again.

namespace chevron {

namespace detail {

/// Copies values between tensors of one shape. If elements of the target share memory (an expanded tensor), each memory is
/// written once.
inline void copy_into(at::Tensor to, at::Tensor from) {
  for (std::int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) != 0 || to.size(d) < 2) continue;
    to = to.narrow(d, 0, 1);
    from = from.narrow(d, 0, 1);
  }
  to.copy_(from);
}

}  // namespace detail

/// The buffers (running means of a normalization …) of stages at one time. Random numbers have no state to be kept: they depend
/// on step, stage and microbatch only.
class buffer_snapshot {
 public:
  buffer_snapshot() = default;

  explicit buffer_snapshot(std::span<stage const> stages) {
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.value.defined()) buffers_.push_back({b.value, {}});
      }
    }
  }

  /// Copies the buffers. Memory of the copies is reused.
  void take() {
    at::NoGradGuard const off;
    for (auto& [buffer, copy] : buffers_) {
      if (copy.defined() && copy.sizes() == buffer.sizes()) {
        copy.copy_(buffer);
      } else {
        copy = buffer.clone(at::MemoryFormat::Contiguous);
      }
    }
  }

  /// Restores the buffers to the values of the last `take`. The writes do not count as changes for autograd, which may have saved
  /// a buffer.
  void put_back() {
    at::NoGradGuard const off;
    for (auto& [buffer, copy] : buffers_) detail::copy_into(buffer.variable_data(), copy);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

}  // namespace chevron
