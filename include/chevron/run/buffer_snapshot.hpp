#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chevron/run/stage.hpp>

/// \file
/// What forwards leave behind in their modules, so that they can be run over.

namespace chevron {

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
        copy = buffer.clone();
      }
    }
  }

  void put_back() {
    at::NoGradGuard const off;
    for (auto& [buffer, copy] : buffers_) buffer.copy_(copy);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

}  // namespace chevron
