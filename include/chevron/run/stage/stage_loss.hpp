#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/split_batch.hpp>

/// \file
/// Losses that stages declare beside the model's loss: the load balance of experts, a prediction of later tokens, a penalty.

namespace chevron {

/// Declares a loss of a stage. The stage's forward computes it and passes it to `add_loss`. A trainer's step minimizes
///
///     model's loss + sum over declared losses of factor · mean
///
/// where each mean is taken over the microbatches of all replicas and all accumulated batches, weighted by `weight`. So the
/// backward of one microbatch's value starts with the gradient
///
///     factor · (weight of the microbatch / sum of the step's weights) · factor of loss scaling
///
/// and the step's report lists the mean under the loss's name, without the factor. Losses of several stages may have the same
/// name, and must then have the same factor: the report sums their means.
struct stage_loss {
  std::string name;   ///< not empty, without line breaks
  double factor = 1;  ///< factor of the mean in the sum that is minimized
  /// Returns the number of tokens, samples or the like over which a microbatch's value is the mean; a value of weight 0 is left
  /// out. Empty: the microbatch's weight in the model's loss.
  loss_weight_function weight = {};
};

namespace detail {

/// Appends `declared` to a stage's losses `to`, without repeating a name.
/// \throws usage_error for a name that is empty or has line breaks, a factor that is not finite, and one name with two factors
inline void add_declared(std::vector<stage_loss>& to, std::vector<stage_loss> declared) {
  for (stage_loss& one : declared) {
    if (one.name.empty() || one.name.find('\n') != std::string::npos)
      throw usage_error("a stage declares a loss `" + one.name + "`: give it a name, in one line");
    if (!std::isfinite(one.factor)) throw usage_error("the factor of loss `" + one.name + "` is " + std::to_string(one.factor));
    auto const same = std::find_if(to.begin(), to.end(), [&](stage_loss const& l) { return l.name == one.name; });
    if (same == to.end()) {
      to.push_back(std::move(one));
    } else if (same->factor != one.factor) {
      throw usage_error("a stage declares loss `" + one.name + "` with the factors " + std::to_string(same->factor) + " and " +
                        std::to_string(one.factor) + ". Remedy: one factor, or another name");
    }
  }
}

}  // namespace detail

/// The sums of all microbatches' weights in a step, over all replicas and all accumulated batches: a total for the model's
/// loss, and a total for each declared loss that has its own `weight`. A number converts to the total of the model's loss:
///
///     trainer.accumulate(batch, {total_tokens, {{"later tokens", total_later_tokens}}});
struct step_total {
  double model = 0;  ///< number of samples, or the sum of `trainer_options::loss_weight`; 0: the trainer sums over replicas
  std::vector<std::pair<std::string, double>> losses = {};  ///< by name; for a missing loss the trainer sums over replicas

  /// \param of_model total of the model's loss \param of_losses totals of the losses that have their own weight, by name
  step_total(double of_model = 0, std::vector<std::pair<std::string, double>> of_losses = {})  // NOLINT: a number is a total
      : model(of_model), losses(std::move(of_losses)) {}

  /// The total of a loss that has its own weight; empty if `losses` has no such name. \param name the loss's name
  std::optional<double> of(std::string const& name) const {
    for (auto const& [known, total] : losses) {
      if (known == name) return total;
    }
    return {};
  }
  friend bool operator==(step_total const&, step_total const&) = default;
};

/// Collects the losses that are passed to `add_loss` on this thread during the object's lifetime. Trainers and evaluators
/// create their collectors; a plain training loop must create one:
///
///     chevron::collected_losses given;
///     at::Tensor const y = block->forward(x);
///     (at::mse_loss(y, target) + 0.01 * given.sum("balance")).backward();
class collected_losses {
 public:
  /// Becomes the thread's innermost collector.
  collected_losses() : outer_(std::exchange(current(), this)) {}
  /// Makes the enclosing collector the innermost again.
  ~collected_losses() { current() = outer_; }
  collected_losses(collected_losses const&) = delete;
  collected_losses& operator=(collected_losses const&) = delete;

  /// The arguments of one call of `add_loss`.
  struct given {
    std::string name;
    at::Tensor value;
  };
  /// The collected losses, in the order of the calls of `add_loss`.
  std::vector<given> const& all() const { return all_; }
  /// Appends a loss to this collector. \param name the loss's name \param value a tensor of one element
  void add(std::string name, at::Tensor value) { all_.push_back({std::move(name), std::move(value)}); }
  /// \returns the sum of the collected losses called `name`, added in the order of the calls of `add_loss`
  /// \throws usage_error if no loss has this name
  at::Tensor sum(std::string const& name) const {
    at::Tensor out;
    for (given const& one : all_) {
      if (one.name == name) out = out.defined() ? at::add(out, one.value) : one.value;
    }
    if (!out.defined()) throw usage_error("no loss `" + name + "` was given: chevron::add_loss(\"" + name + "\", value)");
    return out;
  }

  /// The thread's innermost collector; null if the thread has no collector.
  static collected_losses*& current() {
    static thread_local collected_losses* innermost = nullptr;
    return innermost;
  }

 private:
  collected_losses* outer_;
  std::vector<given> all_;
};

/// Adds a value to a loss of the stage whose forward is running; modules at any depth may call it. The stage declares the
/// loss's name, factor and weight (`stage::losses`). Values of equal name within one forward are summed. A forward that is run
/// again to recompute activations counts once. `evaluator::report` has the means of these losses, `evaluator::loss` leaves them
/// out.
///
///     at::Tensor const share = gate(x).softmax(-1);
///     chevron::add_loss("balance", share.mean(0).square().sum());
///
/// \param name the declared name
/// \param loss a tensor of one element: the mean over the units of the microbatch that the loss's weight counts
/// \throws usage_error for a loss of several elements, and, outside of trainers and collectors, for a loss that needs a gradient
inline void add_loss(std::string name, at::Tensor const& loss) {
  if (loss.numel() != 1) {
    throw usage_error("loss `" + name + "` must be one number, the mean over the microbatch, not a tensor of " +
                      std::to_string(loss.numel()) + " elements");
  }
  if (loss.is_complex()) {
    throw usage_error("loss `" + name + "` is " + std::string(c10::toString(loss.scalar_type())) +
                      ", and only a real number can be minimized. Remedy: at::real, or the absolute value");
  }
  if (collected_losses* const here = collected_losses::current()) return here->add(std::move(name), loss);
  if (at::GradMode::is_enabled() && loss.requires_grad()) {
    throw usage_error(
        "loss `" + name +
        "` was given outside of a trainer's step, and would be lost. Remedy: a chevron::collected_losses around the "
        "forward, whose sums are terms of the loss");
  }
}

namespace detail {

/// A loss that a stage of this rank declares.
struct rank_loss : stage_loss {
  int stage = 0;
  std::size_t index = 0;  ///< index among the stage's losses
};

}  // namespace detail
}  // namespace chevron
