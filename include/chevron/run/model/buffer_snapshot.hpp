#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/MemoryFormat.h>

#include <chevron/run/model/stage.hpp>

/// \file
/// What forwards leave behind in their modules, so that they can be run over.

namespace chevron {

namespace detail {

/// Copies values of the same shape, also into a tensor that is expanded, some of whose elements are one in memory.
inline void copy_into(at::Tensor to, at::Tensor from) {
  for (std::int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) != 0 || to.size(d) < 2) continue;
    to = to.narrow(d, 0, 1);
    from = from.narrow(d, 0, 1);
  }
  to.copy_(from);
}

}  // namespace detail

/// The buffers (running means of a normalization …) of one rank's stages at one time. What forwards draw at random needs no
/// keeping: it depends on step, stage and microbatch only.
class buffer_snapshot {
 public:
  buffer_snapshot() = default;

  explicit buffer_snapshot(std::vector<stage> const& stages) {
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.value.defined()) buffers_.push_back({b.value, {}});
      }
    }
  }

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

  void put_back() {
    at::NoGradGuard const off;
    for (auto& [buffer, copy] : buffers_) detail::copy_into(buffer, copy);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

}  // namespace chevron
