#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chevron/run/core/error.hpp>

/// \file
/// Losses that a stage adds to the model's: the balance of a mixture of experts, a penalty on activations.

namespace chevron {

namespace detail {

/// What this thread's forward knows of its microbatch.
struct microbatch_scope {
  /// \param loss_weight what the backward of the microbatch's loss begins with, read when that runs; null: 1
  /// \param may_change set to true where the forward uses it, so that no graph of the device repeats one step's number; may be null
  microbatch_scope(double const* loss_weight, bool* may_change)
      : weight(loss_weight), changes(may_change), outer_(std::exchange(current(), this)) {}
  ~microbatch_scope() { current() = outer_; }
  microbatch_scope(microbatch_scope const&) = delete;
  microbatch_scope& operator=(microbatch_scope const&) = delete;

  static microbatch_scope*& current() {
    static thread_local microbatch_scope* innermost = nullptr;
    return innermost;
  }

  double const* weight;
  bool* changes;

 private:
  microbatch_scope* outer_;
};

struct attached_loss : torch::autograd::Function<attached_loss> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor const& x, at::Tensor const& loss,
                            double const* weight) {
    ctx->save_for_backward({loss.detach()});
    ctx->saved_data["weight"] = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(weight));
    ctx->set_materialize_grads(false);
    return x.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    auto const* const place = reinterpret_cast<double const*>(static_cast<std::intptr_t>(ctx->saved_data["weight"].toInt()));
    double const weight = place == nullptr ? 1 : *place;
    if (std::isnan(weight)) {
      throw usage_error(
          "an auxiliary loss weighs what its microbatch counts in the step, and this rank was not given what tells. Remedy: "
          "give it the inputs or targets, with loss_weight those that it counts");
    }
    at::Tensor const of_loss = weight == 0 ? at::Tensor() : at::full_like(ctx->get_saved_variables()[0], weight);
    return {gradients[0], of_loss, at::Tensor()};
  }
};

}  // namespace detail

/// Adds a loss of a stage's own to the step's: gives `x`, and in the backward `loss` gets the gradient that it would get as a
/// term of the microbatch's loss. So it weighs the microbatch's share of the step (over replicas, accumulated batches and
/// whatever `trainer_options::loss_weight` counts), and the factor of loss scaling. The loss that a step reports does not contain
/// it. Outside of a trainer's step the gradient is 1, that of a term of the loss that `backward()` is called on.
///
///     auto const share = gate(x).softmax(-1).mean(0);
///     return chevron::auxiliary_loss(experts(x), 0.01 * share.square().sum());
///
/// \param x what goes on through the stage, and leads to the model's loss: `loss` is differentiated when the gradient of `x` comes
/// \param loss one number, a mean over the microbatch's samples (or over what is counted)
/// \throws usage_error for a loss of several numbers; in the backward on a rank that was not given what its microbatches count
inline at::Tensor auxiliary_loss(at::Tensor const& x, at::Tensor const& loss) {
  if (loss.numel() != 1) {
    throw usage_error("an auxiliary loss is one number, the mean over the microbatch, not a tensor of " +
                      std::to_string(loss.numel()) + " elements");
  }
  if (!at::GradMode::is_enabled() || !loss.requires_grad()) return x;
  auto const* const here = detail::microbatch_scope::current();
  if (here != nullptr && here->changes != nullptr) *here->changes = true;
  return detail::attached_loss::apply(x, loss, here == nullptr ? nullptr : here->weight);
}

}  // namespace chevron
