#pragma once

#include <cmath>
#include <span>
#include <string>

#include <chevron/run/core/error.hpp>
#include <chevron/run/train/loss_scale.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// Decides whether a step is applied, clipped, skipped or refused.

namespace chevron::detail {

/// Decides on the steps of one training job, from numbers that are equal on all ranks, so all ranks decide equally.
class step_policy {
 public:
  /// \param options the policy copies clipping, loss scaling, `when_not_finite`, `stable_steps`, and whether there is a
  /// `loss_weight`
  explicit step_policy(trainer_options const& options)
      : clip_(options.clip_grad_norm),
        weighs_(static_cast<bool>(options.loss_weight)),
        when_not_finite_(options.when_not_finite),
        stable_steps_(options.stable_steps) {
    if (options.scaling) scale_ = loss_scale(*options.scaling);
  }

  /// Decides on a step by the loss and norm in the report, writes the decision to the report, and updates the factor of loss
  /// scaling.
  /// \param loss_culprit words for a loss that is infinite or NaN; empty if all are finite
  /// \param gradient_culprit words for a gradient that is infinite or NaN; empty if all are finite
  /// \throws numerical_error with `not_finite::stop`, if a smaller loss factor cannot help; the caller must not change a
  /// parameter
  void decide(step_report& report, std::string const& loss_culprit, std::string const& gradient_culprit,
              error_context const& here) {
    std::string const& culprit = loss_culprit.empty() ? gradient_culprit : loss_culprit;
    report.loss_factor = scale_.factor();
    // A smaller factor may help against an overflow of the gradient, never against a loss that is not finite.
    bool const overflow = loss_culprit.empty() && !culprit.empty() && scale_.can_back_off();
    scale_.step(!culprit.empty());
    report.skipped = !culprit.empty();
    report.clipped = !report.skipped && clip_ > 0 && report.grad_norm > clip_;
    steps_in_order_ = report.skipped || report.clipped ? 0 : steps_in_order_ + 1;
    if (report.skipped && !overflow && when_not_finite_ == not_finite::stop) {
      std::string const where =
          loss_culprit.empty()
              ? " Of the gradients that are not finite the backward computed this one first: the cause is in its "
                "stage, or between this parameter and the next ones."
              : "";
      std::string const masked =
          loss_culprit.empty() || weighs_
              ? ""
              : "; where a loss is a mean over targets that count and a microbatch may have none (all of its labels ignored, "
                "say), trainer_options::loss_weight, by which microbatches that count 0 are left out";
      throw numerical_error(culprit + " is not finite; no parameter was changed." + where +
                                " Remedy: a lower learning rate, clip_grad_norm, or not_finite::skip" + masked,
                            here);
    }
  }

  /// The factor that scales gradients of a clipped step, by the formula of torch's clip_grad_norm_.
  double clip_factor(step_report const& report) const { return clip_ / (report.grad_norm + 1e-6); }

  /// Whether ranks step before the verdict: true after `stable_steps` steps in a row that were neither skipped nor clipped.
  bool is_stable() const { return steps_in_order_ >= stable_steps_; }

  /// Whether this rank's numbers alone prove that the step will be skipped or clipped. The norm's limit has a margin, since the
  /// sum over all ranks is added in another order, and may differ in its last bits.
  /// \param losses losses of microbatches \param squared_norms squared norms of gradients, by parameter
  bool certainly_wrong(std::span<double const> losses, std::span<double const> squared_norms) const {
    double sum = 0;
    for (double const loss : losses) {
      if (!std::isfinite(loss)) return true;
    }
    for (double const squared : squared_norms) {
      if (!std::isfinite(squared)) return true;
      sum += squared;
    }
    return clip_ > 0 && std::sqrt(sum) > clip_ * (1 + 1e-9);
  }

  /// The factor of loss scaling.
  loss_scale& scaling() { return scale_; }
  loss_scale const& scaling() const { return scale_; }

 private:
  double clip_;
  bool weighs_;
  not_finite when_not_finite_;
  int stable_steps_;
  loss_scale scale_;
  int steps_in_order_ = 0;  // steps in a row that were neither skipped nor clipped
};

}  // namespace chevron::detail
