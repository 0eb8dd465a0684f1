#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

/// \file
/// The tensor to which autograd adds a parameter's gradient.

namespace chevron::detail {

/// The hook of a half-precision parameter: adds `.grad` to `into`, in single precision, and resets `.grad`.
struct add_in_float final : torch::autograd::PostAccumulateGradHook {
  at::Tensor into;
  void operator()(at::Tensor const& p) override {
    if (!into.defined()) return;
    at::NoGradGuard const off;
    into.add_(p.grad());
    p.mutable_grad().reset();
  }
};

/// Whether a parameter's gradient is summed in single precision, outside of `.grad`.
inline bool in_float(at::Tensor const& p) { return p.scalar_type() == at::kHalf || p.scalar_type() == at::kBFloat16; }

/// The `add_in_float` hook of a parameter; null if the parameter has no such hook.
inline add_in_float* hook_of(at::Tensor const& p) {
  return dynamic_cast<add_in_float*>(torch::autograd::impl::post_acc_grad_hooks(p).get());
}

/// From this call on, makes autograd add the gradient of `p` to `gradient`.
/// \param gradient undefined: autograd allocates `.grad`
inline void add_gradients_into(at::Tensor const& p, at::Tensor const& gradient) {
  if (!in_float(p)) {
    if (!p.grad().is_same(gradient)) p.mutable_grad() = gradient;
    return;
  }
  p.mutable_grad().reset();
  if (hook_of(p) == nullptr) torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<add_in_float>());
  hook_of(p)->into = gradient;
}

/// A view of a gradient's elements with the parameter's strides, the layout of autograd's gradients: kernels choose algorithms
/// by strides. \param row the elements, in the order of the parameter's memory
inline at::Tensor gradient_view(at::Tensor const& p, at::Tensor const& row) {
  return p.is_non_overlapping_and_dense() ? row.as_strided(p.sizes(), p.strides()) : row.view(p.sizes());
}

}  // namespace chevron::detail
