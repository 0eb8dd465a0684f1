#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/data_agreement.hpp>
#include <chevron/run/loss_scale.hpp>

/// \file
/// What is asked of a step's end, what a rank contributes to it, and what comes of it.

namespace chevron {

/// Makes the optimizer for one rank's parameters.
using optimizer_factory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

/// `optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-4))`
template <class Optimizer, class Options>
optimizer_factory optimizer(Options options) {
  return [options](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

/// What to do with a step whose loss or gradient is infinite or not a number.
enum class not_finite {
  stop,  ///< throw `numerical_error` on every rank; no parameter was changed
  skip   ///< leave parameters and optimizer as they are and go on
};

/// What becomes of the gradients of several replicas.
enum class over_replicas {
  mean,  ///< the gradient of the mean loss over all samples of all replicas
  sum    ///< each replica has the mean over its own samples, and these are added
};

struct update_options {
  double clip_grad_norm = 0;  ///< scale gradients so that their global norm is at most this; 0: never
  not_finite when_not_finite = not_finite::stop;
  std::function<double(long step)> learning_rate;  ///< empty: as the optimizer has it
  bool post_validation = false;                    ///< step before all ranks have been heard, and put it right afterwards
  int calm_steps = 10;                             ///< but only after so many steps in a row that nothing had to be put right in
  std::optional<loss_scaling> scaling = {};        ///< gradients come multiplied by `loss_factor`
  over_replicas sums = over_replicas::mean;
  data_check check_data = data_check::first_step;  ///< when the ranks of a pipeline compare what they were given
};

/// What every rank knows at the end of a step.
struct update_result {
  double loss = 0;         ///< mean over all samples, or what else microbatches count, of all replicas
  double grad_norm = 0;    ///< over all parameters, before clipping
  bool skipped = false;    ///< something was not finite, nothing was changed
  double loss_factor = 1;  ///< of loss scaling
  bool clipped = false;    ///< the norm was above the limit, gradients were scaled down
  double bubble = 0;       ///< share of ranks × longest rank's time in which ranks did not compute
  double learning_rate = 0;
  std::int64_t samples = 0;  ///< over all replicas
};

/// What a rank contributes to it.
struct update_input {
  std::span<double const> weighted_losses;  ///< by microbatch; zeros on ranks without the last stage
  double counts = 0;                        ///< what this replica's microbatches count
  double all_counts = 0;                    ///< the same over all replicas, as used for the weights
  std::int64_t samples = 0;                 ///< of this replica
  double busy_seconds = 0;
  double span_seconds = 0;
  std::span<double const> data = {};  ///< fingerprints of its batch; empty if none are compared in this step
};

namespace detail {

/// A number for people: `16`, `0.25`.
inline std::string plain(double value) {
  std::string text(32, '\0');
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), "%.10g", value)));
  return text;
}

}  // namespace detail

}  // namespace chevron
