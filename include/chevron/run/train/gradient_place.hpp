#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

/// \file
/// The tensor to which autograd adds a parameter's gradient.

namespace chevron::detail {

/// The hook of a half-precision parameter: adds `.grad` to `into`, in single precision, and resets `.grad`. A parameter has one
/// such hook, so the user's is called from here: with each gradient by itself, not with the sum so far.
struct add_in_float final : torch::autograd::PostAccumulateGradHook {
  at::Tensor into;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> users;  ///< of the parameter before; may be null
  void operator()(at::Tensor const& p) override {
    if (users) (*users)(p);
    if (!into.defined() || !p.grad().defined()) return;
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
  if (hook_of(p) == nullptr) {
    auto ours = std::make_unique<add_in_float>();
    ours->users = std::move(torch::autograd::impl::post_acc_grad_hooks(p));
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::move(ours));
  }
  hook_of(p)->into = gradient;
}

/// Lets autograd add the gradient of `p` to `.grad` again, and gives the user's hook back to `p`.
inline void add_gradients_to_grad(at::Tensor const& p) {
  if (add_in_float* const ours = hook_of(p)) torch::autograd::impl::set_post_acc_grad_hooks(p, std::move(ours->users));
}

/// A view of a gradient's elements with the parameter's strides, the layout of autograd's gradients: kernels choose algorithms
/// by strides. \param row the elements, in the order of the parameter's memory
inline at::Tensor gradient_view(at::Tensor const& p, at::Tensor const& row) {
  return p.is_non_overlapping_and_dense() ? row.as_strided(p.sizes(), p.strides()) : row.view(p.sizes());
}

}  // namespace chevron::detail
