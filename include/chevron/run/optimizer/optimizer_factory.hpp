#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

/// \file
/// The function that makes a rank's optimizer.

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

/// Makes the optimizer of one rank: wraps any function that takes the rank's trained parameters as a
/// `std::vector<named_parameter>` or a `std::vector<at::Tensor>`, in the order of stages and registration. A parameter that
/// several stages of the rank share is in the list once, with the first stage.
class optimizer_factory {
 public:
  /// \param make a function that returns a `std::unique_ptr` to an optimizer
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

  /// Makes the optimizer for these parameters.
  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<named_parameter> const& all) const { return make_(all); }
  /// Makes the optimizer for tensors without names, such as those of an unpipelined model: passes each with stage 0 and an
  /// empty name.
  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<at::Tensor> const& all) const {
    std::vector<named_parameter> nameless;
    for (at::Tensor const& value : all) nameless.push_back({0, "", value});
    return make_(nameless);
  }

 private:
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<named_parameter> const&)> make_;
};

/// Returns a factory that puts all parameters into one group:
/// `optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-4))`.
/// \param options options of the group
template <class Optimizer, class Options>
optimizer_factory optimizer(Options options) {
  return [options](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

}  // namespace chevron
