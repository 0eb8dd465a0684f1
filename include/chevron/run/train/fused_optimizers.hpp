#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// AdamW and SGD that step a group's parameters of one device and dtype by one call of LibTorch's fused kernels, like PyTorch's
/// `fused=True`: on a CPU in one pass over memory, on a GPU by one kernel instead of nine per parameter. A parameter's state
/// has the class that torch::optim uses, so a fused optimizer resumes from a checkpoint of the unfused class, and vice versa.

namespace chevron {

namespace detail {

/// The tensors of one kernel call, all of one device and dtype, in the order of the group.
struct fused_lists {
  tensors values, gradients;
};

/// Returns `t` itself if `t` has the strides of `like`, else a copy with these strides: a fused kernel indexes the memory of
/// all its tensors with one index.
inline at::Tensor laid_out_as(at::Tensor const& like, at::Tensor const& t) {
  return t.strides() == like.strides() ? t : at::empty_like(like, like.options()).copy_(t);
}

/// Collects a group's parameters that have gradients, in a list per device and dtype.
/// \param optimizer name of the optimizer, for errors
/// \throws usage_error for a parameter or gradient that the kernels do not support
inline std::vector<fused_lists> fused_lists_of(torch::optim::OptimizerParamGroup const& group, std::string const& optimizer) {
  std::vector<fused_lists> all;
  for (at::Tensor const& p : group.params()) {
    at::Tensor const& g = p.grad();
    if (!g.defined()) continue;
    bool const sparse = g.layout() != at::kStrided;
    if (sparse || p.is_complex() || g.scalar_type() != p.scalar_type() || !p.is_non_overlapping_and_dense()) {
      throw usage_error(
          optimizer + " steps real parameters that fill their memory, with gradients of the same dtype: of a parameter " +
          c10::str(p.sizes()) + " of " + c10::toString(p.scalar_type()) +
          (sparse ? " the gradient is sparse"
                  : " with strides " + c10::str(p.strides()) + " the gradient is of " + c10::toString(g.scalar_type())) +
          ". Remedy: the torch::optim class of that name, or another parameter");
    }
    auto const fits = [&](fused_lists const& l) {
      return l.values.front().device() == p.device() && l.values.front().scalar_type() == p.scalar_type();
    };
    auto found = std::find_if(all.begin(), all.end(), fits);
    if (found == all.end()) found = all.insert(all.end(), fused_lists());
    found->values.push_back(p);
    found->gradients.push_back(laid_out_as(p, g));
  }
  return all;
}

/// Runs a step of an optimizer: calls `step(lists, options)` for each group, once per device and dtype.
/// \param name name of the optimizer, for errors
/// \returns the loss of the closure, which runs with gradients on; undefined without a closure
template <class Options, class Step>
at::Tensor step_lists(torch::optim::Optimizer& of, std::string const& name, torch::optim::Optimizer::LossClosure const& closure,
                      Step const& step) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode const on(true);
    loss = closure();
  }
  at::NoGradGuard const off;
  for (auto const& group : of.param_groups()) {
    auto const& options = static_cast<Options const&>(group.options());
    for (fused_lists const& lists : fused_lists_of(group, name)) step(lists, options);
  }
  return loss;
}

}  // namespace detail

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) by `at::_fused_adamw_`. Results equal those of PyTorch's
/// `AdamW(fused=True)`, on a CPU to the last bit; results of torch::optim::AdamW, which rounds between its operations, differ
/// in the last bits.
class fused_adamw final : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;

  /// Steps all parameters that have gradients.
  /// \param closure computes the loss again, with gradients on; may be empty
  /// \returns the closure's loss; undefined without a closure
  /// \throws usage_error for sparse gradients, complex parameters, parameters whose memory has gaps or overlaps, and gradients
  /// whose dtype is not the parameter's
  at::Tensor step(LossClosure closure = nullptr) override {
    return detail::step_lists<torch::optim::AdamWOptions>(
        *this, "fused_adamw", closure, [this](auto const& lists, auto const& options) { step(lists, options); });
  }

 private:
  void step(detail::fused_lists const& lists, torch::optim::AdamWOptions const& options) {
    tensors averages, squares, largest;
    std::vector<float> steps;
    for (at::Tensor const& p : lists.values) {
      auto& state = state_of(p);
      state.step(state.step() + 1);
      steps.push_back(static_cast<float>(state.step()));
      averages.push_back(kept(p, state.exp_avg()));
      squares.push_back(kept(p, state.exp_avg_sq()));
      if (options.amsgrad()) largest.push_back(kept(p, state.max_exp_avg_sq()));
    }
    at::_fused_adamw_(lists.values, lists.gradients, averages, squares, largest, on_device(steps, lists.values.front().device()),
                      options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(),
                      options.eps(), options.amsgrad(), /*maximize=*/false);
  }

  torch::optim::AdamWParamState& state_of(at::Tensor const& p) {
    auto& found = state()[p.unsafeGetTensorImpl()];
    if (!found) found = std::make_unique<torch::optim::AdamWParamState>();
    return static_cast<torch::optim::AdamWParamState&>(*found);
  }

  /// Returns a tensor of the state in the layout of its parameter; creates it, filled with zeros, at the first use.
  static at::Tensor kept(at::Tensor const& p, at::Tensor& in_state) {
    in_state = in_state.defined() ? detail::laid_out_as(p, in_state) : at::zeros_like(p);
    return in_state;
  }

  /// Copies the step number of each parameter into a scalar on the device, since the kernels read step numbers there.
  tensors on_device(std::vector<float> const& steps, at::Device device) {
    auto const count = static_cast<std::int64_t>(steps.size());
    if (!steps_.defined() || steps_.device() != device || steps_.numel() != count) {
      steps_ = at::empty({count}, at::TensorOptions(device).dtype(at::kFloat));
      each_step_ = steps_.unbind();
    }
    if (std::equal(steps.begin() + 1, steps.end(), steps.begin())) {
      steps_.fill_(steps.front());
    } else {
      at::Tensor const here = at::empty({count}, at::TensorOptions().dtype(at::kFloat));
      std::copy(steps.begin(), steps.end(), here.mutable_data_ptr<float>());
      steps_.copy_(here);
    }
    return each_step_;
  }

  at::Tensor steps_;
  tensors each_step_;  // views of the elements of `steps_`
};

/// SGD with momentum by `at::_fused_sgd_`; results equal those of PyTorch's `SGD(fused=True)`. Refuses half precision on the
/// CPU, since LibTorch's kernel is wrong there: up to LibTorch 2.15 the kernel reads the momentum as float and does not write
/// the parameter.
class fused_sgd final : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;

  /// Steps all parameters that have gradients. \returns the loss of the closure; undefined without a closure
  /// \throws usage_error in the cases of fused_adamw::step, and for half precision on the CPU
  at::Tensor step(LossClosure closure = nullptr) override {
    return detail::step_lists<torch::optim::SGDOptions>(*this, "fused_sgd", closure,
                                                        [this](auto const& lists, auto const& options) { step(lists, options); });
  }
  /// The number of kernel calls of `step` so far; a step of parameters without gradients makes none.
  std::int64_t calls() const { return calls_; }

 private:
  static void check_dtype(at::Tensor const& p) {
    if (!p.is_cpu() || !c10::isReducedFloatingType(p.scalar_type())) return;
    throw usage_error(std::string("LibTorch's fused SGD leaves parameters of ") + c10::toString(p.scalar_type()) +
                      " on the CPU as they are. Remedy: torch::optim::SGD, fused_adamw, or parameters in single precision");
  }

  void step(detail::fused_lists const& lists, torch::optim::SGDOptions const& options) {
    check_dtype(lists.values.front());
    ++calls_;
    if (options.momentum() == 0) return call(lists, {}, options, /*first=*/false);
    detail::fused_lists old, fresh;
    tensors old_buffers, fresh_buffers;
    for (std::size_t i = 0; i < lists.values.size(); ++i) {
      at::Tensor const& p = lists.values[i];
      auto& found = state()[p.unsafeGetTensorImpl()];
      if (!found) found = std::make_unique<torch::optim::SGDParamState>();
      at::Tensor& buffer = static_cast<torch::optim::SGDParamState&>(*found).momentum_buffer();
      bool const is_fresh = !buffer.defined();
      buffer = is_fresh ? at::empty_like(p) : detail::laid_out_as(p, buffer);
      detail::fused_lists& to = is_fresh ? fresh : old;
      to.values.push_back(p);
      to.gradients.push_back(lists.gradients[i]);
      (is_fresh ? fresh_buffers : old_buffers).push_back(buffer);
    }
    call(old, old_buffers, options, false);
    call(fresh, fresh_buffers, options, true);
  }

  static void call(detail::fused_lists const& lists, tensors const& buffers, torch::optim::SGDOptions const& options,
                   bool first) {
    if (lists.values.empty()) return;
    at::_fused_sgd_(lists.values, lists.gradients, buffers, options.weight_decay(), options.momentum(), options.lr(),
                    options.dampening(), options.nesterov(), /*maximize=*/false, first);
  }

  std::int64_t calls_ = 0;
};

}  // namespace chevron
