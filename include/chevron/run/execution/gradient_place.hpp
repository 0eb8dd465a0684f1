#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

/// \file
/// Where autograd adds a parameter's gradient.

namespace chevron::detail {

/// Adds a gradient in single precision and lets go of it.
struct add_in_float final : torch::autograd::PostAccumulateGradHook {
  at::Tensor into;
  void operator()(at::Tensor const& p) override {
    if (!into.defined()) return;
    at::NoGradGuard const off;
    into.add_(p.grad());
    p.mutable_grad().reset();
  }
};

/// Whether a parameter's gradient is added up in single precision, and its `.grad` is empty meanwhile.
inline bool in_float(at::Tensor const& p) { return p.scalar_type() == at::kHalf || p.scalar_type() == at::kBFloat16; }

/// Null where the parameter has none.
inline add_in_float* hook_of(at::Tensor const& p) {
  return dynamic_cast<add_in_float*>(torch::autograd::impl::post_acc_grad_hooks(p).get());
}

/// Has autograd add to this gradient from now on.
/// \param gradient undefined: autograd makes one of its own
inline void add_gradients_into(at::Tensor const& p, at::Tensor const& gradient) {
  if (!in_float(p)) {
    if (!p.grad().is_same(gradient)) p.mutable_grad() = gradient;
    return;
  }
  p.mutable_grad().reset();
  if (hook_of(p) == nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<add_in_float>());
  hook_of(p)->into = gradient;
}

/// With the parameter's own strides, as autograd has it: kernels choose their ways by them.
/// \param row of the gradient's elements, in the order of the parameter's memory
inline at::Tensor gradient_view(at::Tensor const& p, at::Tensor const& row) {
  return p.is_non_overlapping_and_dense() ? row.as_strided(p.sizes(), p.strides()) : row.view(p.sizes());
}

}  // namespace chevron::detail
