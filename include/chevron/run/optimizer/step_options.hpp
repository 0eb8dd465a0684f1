#pragma once

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/data/data_agreement.hpp>
#include <chevron/run/optimizer/loss_scale.hpp>

/// \file
/// What is asked of a step's end, what a rank contributes to it, and what comes of it.

namespace chevron {

/// A parameter that this rank trains.
struct named_parameter {
  int stage = 0;
  std::string name;  ///< within its stage
  at::Tensor value;
};

namespace detail {

template <class Make, class Each>
concept makes_optimizer_of = std::is_invocable_r_v<std::unique_ptr<torch::optim::Optimizer>, Make const&, std::vector<Each>>;

}  // namespace detail

/// Makes the optimizer of one rank: any function of its `std::vector<named_parameter>`, or of the `std::vector<at::Tensor>`
/// alone. A parameter that several of its stages share is there once, as the first one's.
class optimizer_factory {
 public:
  template <class Make>
  requires(!std::same_as<Make, optimizer_factory> &&
           (detail::makes_optimizer_of<Make, at::Tensor> || detail::makes_optimizer_of<Make, named_parameter>))
      optimizer_factory(Make make) {  // NOLINT
    if constexpr (detail::makes_optimizer_of<Make, at::Tensor>) {
      make_ = [make = std::move(make)](std::vector<named_parameter> const& all) -> std::unique_ptr<torch::optim::Optimizer> {
        std::vector<at::Tensor> values;
        for (named_parameter const& p : all) values.push_back(p.value);
        return make(std::move(values));
      };
    } else {
      make_ = std::move(make);
    }
  }

  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<named_parameter> const& all) const { return make_(all); }
  /// The same for tensors without names, as of a model in one piece.
  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<at::Tensor> const& all) const {
    std::vector<named_parameter> nameless;
    for (at::Tensor const& value : all) nameless.push_back({0, "", value});
    return make_(nameless);
  }

 private:
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<named_parameter> const&)> make_;
};

/// `optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-4))`: all parameters alike.
template <class Optimizer, class Options>
optimizer_factory optimizer(Options options) {
  return [options](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

/// What is given to who looks at a step's gradients before the optimizer does. They are this rank's, in `.grad()` of each
/// parameter.
struct final_gradients {
  long step = 0;
  double loss = 0;  ///< these three as in the step's report
  double grad_norm = 0;
  double learning_rate = 0;
  std::span<named_parameter const> parameters;
};

/// What to do with a step whose loss or gradient is infinite or not a number.
enum class not_finite {
  stop,  ///< throw `numerical_error` on every rank; no parameter was changed
  skip   ///< leave parameters and optimizer as they are and go on
};

/// What becomes of the gradients of several replicas.
enum class gradient_reduction {
  mean,  ///< the gradient of the mean loss over all samples of all replicas
  sum    ///< each replica has the mean over its own samples, and these are added
};

struct update_options {
  double clip_grad_norm = 0;  ///< scale gradients so that their global norm is at most this; 0: never
  not_finite when_not_finite = not_finite::stop;
  std::function<double(long step)> learning_rate;  ///< empty: as the optimizer has it
  bool post_validation = false;                    ///< step before all ranks have been heard, and put it right afterwards
  int stable_steps = 10;                           ///< but only after so many steps in a row that nothing had to be put right in
  std::optional<loss_scaling> scaling = {};        ///< gradients come multiplied by `loss_factor`
  gradient_reduction reduction = gradient_reduction::mean;
  data_check check_data = data_check::first_step;  ///< when the ranks of a pipeline compare what they were given
  std::function<void(final_gradients const&)> before_optimizer_step = {};
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
