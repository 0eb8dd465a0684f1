#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <chevron/run/error.hpp>
#include <chevron/run/failure.hpp>
#include <chevron/run/message.hpp>

/// \file
/// What Gloo can send.

namespace chevron::detail {

/// Dense, contiguous, in main memory; the caller's own memory whenever it is so already. An undefined tensor stays one.
inline at::Tensor sendable(at::Tensor const& value, awaited const& mine) {
  if (!value.defined()) return value;
  if (!value.device().is_cpu() || value.layout() != at::kStrided) {
    throw usage_error(mine.action_text() + ": Gloo sends dense tensors in main memory, not " +
                      (value.device().is_cpu() ? "a sparse one" : "one on " + value.device().str()) +
                      ". Remedy: .cpu(), or another transport");
  }
  if (!value.requires_grad() && value.is_contiguous()) return value;
  return value.detach().contiguous();
}

}  // namespace chevron::detail
