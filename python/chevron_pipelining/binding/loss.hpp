#pragma once

#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/loss.hpp>

#include "module.hpp"

/// \file
/// The loss, a function of Python.

namespace chevron_pipelining {

/// Makes Chevron's loss. \param weighed whether a microbatch's gradient is multiplied by the microbatch's share of the mean
inline chevron::loss_function loss_of(object callee, bool weighed) {
  chevron::loss_function out([callee = std::move(callee)](std::span<at::Tensor const> all) { return call(callee, all); });
  out.side_inputs({micro_batch_number});
  if (!weighed) out.unweighed();
  return out;
}

}  // namespace chevron_pipelining
