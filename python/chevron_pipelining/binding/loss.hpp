#pragma once

#include <span>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/loss.hpp>

#include "module.hpp"

/// \file
/// The loss, a function of Python.

namespace chevron_pipelining {

/// Starts a microbatch's backward with 1, whatever the microbatch's weight: gradients are the plain sum over microbatches, which
/// PyTorch's runtime divides by their number at the end.
struct unweighed : torch::autograd::Function<unweighed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor const& loss) { return loss.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list const& given) {
    return {at::ones_like(given[0])};
  }
};

/// Makes Chevron's loss. \param weighed whether a microbatch's gradient is multiplied by the microbatch's share of the mean
inline chevron::loss_function loss_of(object callee, bool weighed) {
  return chevron::loss_function([callee = std::move(callee), weighed](std::span<at::Tensor const> all) {
           chevron::tensors out = call(callee, all);
           if (!weighed && out.size() == 1 && out[0].defined()) out[0] = unweighed::apply(out[0]);
           return out;
         })
      .side_inputs({micro_batch_number});
}

}  // namespace chevron_pipelining
