#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// What the last stage's outputs are measured by.

namespace chevron {

/// A loss: the last stage's outputs, then the targets, to one number, the mean over the microbatch's samples (or over what
/// `trainer_options::loss_weight` counts). Made of any callable that takes these tensors, up to eight, or all of them as one
/// `std::span<at::Tensor const>`.
///
/// Outputs and targets are those of one microbatch: dimension 0 is its samples. The result is a tensor of one element, of any
/// floating-point dtype, on the device of the outputs.
class loss_function {
 public:
  loss_function() = default;

  template <class Callable>
  requires(!std::same_as<std::remove_cvref_t<Callable>, loss_function> &&
           (detail::takes_any_count<Callable>() || detail::takes_a_span<Callable>()))
      loss_function(Callable call) {  // NOLINT: a callable is a loss
    call_ = [call = std::move(call)](tensors& arguments, tensors& results) mutable {
      detail::call_with(call, arguments, results, "the loss function");
    };
  }

  explicit operator bool() const { return static_cast<bool>(call_); }

  /// The loss of one microbatch, with its graph.
  /// \throws usage_error where the callable gives anything but one number
  at::Tensor operator()(tensors const& outputs, tensors const& targets) {
    tensors arguments = outputs, results;
    arguments.insert(arguments.end(), targets.begin(), targets.end());
    call_(arguments, results);
    if (results.size() != 1 || !results[0].defined() || results[0].numel() != 1) {
      bool const one = results.size() == 1 && results[0].defined();
      throw usage_error("the loss function must give one number, the mean over the microbatch; it gave " +
                        (one ? "a tensor of " + std::to_string(results[0].numel()) + " elements"
                             : std::to_string(results.size()) + " tensors" + (results.size() == 1 ? " without a value" : "")));
    }
    return std::move(results[0]);
  }

 private:
  std::function<void(tensors&, tensors&)> call_;
};

}  // namespace chevron
