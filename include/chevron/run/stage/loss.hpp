#pragma once

#include <concepts>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/tensor_call.hpp>

/// \file
/// The loss function, which the last stage computes.

namespace chevron {

/// A loss: a function of the last stage's outputs, then the targets, then its side inputs, that returns one number, the mean
/// over the microbatch's samples (or over the units that `trainer_options::loss_weight` counts). Converts from any callable
/// that takes these tensors, as up to eight arguments or as one `std::span<at::Tensor const>`; or, like a stage, from a module
/// such as `torch::nn::MSELoss()`.
///
/// Outputs and targets are those of one microbatch; dimension 0 counts samples. The result is a tensor of one element, of any
/// floating-point dtype, on the device of the outputs.
///
/// A loss trains no parameters, and a module's mode is not changed. Parameters of the loss that need a gradient are an error in
/// the first steps, unless the last stage has also registered them.
class loss_function {
 public:
  loss_function() = default;

  /// \param call a callable or module as described above
  template <class Callable>
  requires(!std::same_as<std::remove_cvref_t<Callable>, loss_function>)
      loss_function(Callable call) {  // NOLINT: a callable is a loss
    if constexpr (detail::can_be_called<Callable>()) {
      takes_ = detail::counts_taken<decltype(detail::callee_of(std::move(call)))>();
      call_ = detail::tensor_call(detail::callee_of(std::move(call)));
    }
  }

  /// Names tensors of the batch that the loss takes after its targets, in this order: class weights, a mask, a number that
  /// changes from step to step. A name that a step's batch lacks is an error of that step, with exit code 2.
  ///
  ///     .loss = chevron::loss_function(weighted_cross_entropy).side_inputs({"class_weights"})
  loss_function& side_inputs(std::vector<std::string> names) {
    side_inputs_ = std::move(names);
    return *this;
  }
  std::vector<std::string> const& side_input_names() const { return side_inputs_; }  ///< in the order of arguments

  /// Starts the backward of each microbatch with 1 in place of the microbatch's weight: gradients are then those of the sum of
  /// the microbatches' losses, as in PyTorch's pipeline runtime, which divides the sum at the end of a step. `step_report::loss`
  /// is the mean nevertheless, and a microbatch of weight 0 is left out. \returns this loss
  loss_function& unweighed() {
    weighed_ = false;
    return *this;
  }
  bool weighed() const { return weighed_; }  ///< false after `unweighed`

  explicit operator bool() const { return static_cast<bool>(call_); }  ///< false for an empty function

  /// The loss of one microbatch, with its graph.
  /// \param outputs the last stage's outputs \param targets the microbatch's targets \param side_inputs the batch's side inputs
  /// \throws usage_error where the callable takes another number of tensors, or returns anything but one number
  at::Tensor operator()(tensors const& outputs, tensors const& targets, std::span<side_input const> side_inputs = {}) {
    tensors arguments = outputs, results;
    arguments.insert(arguments.end(), targets.begin(), targets.end());
    for (std::string const& name : side_inputs_)
      arguments.push_back(detail::side_input_named(name, side_inputs, "the loss function"));
    if (!call_(arguments, results)) {
      throw usage_error(
          detail::wrong_count("the loss function", takes_, arguments.size()) + detail::counted(outputs.size(), "output") +
          " of the last stage, " + (targets.empty() ? "no targets" : detail::counted(targets.size(), "target")) +
          (side_inputs_.empty() ? "" : " and " + detail::named_ones(side_inputs_, "side input", "side inputs")) + ". Remedy: " +
          (targets.empty() ? "the batch's targets on the rank of the last stage, which was given none; or a" : "a") +
          " loss that takes outputs, then targets, then the tensors of loss_function::side_inputs");
    }
    if (results.size() != 1 || !results[0].defined() || results[0].numel() != 1) {
      bool const one = results.size() == 1 && results[0].defined();
      throw usage_error("the loss function must give one number, the mean over the microbatch; it gave " +
                        (one ? "a tensor of " + std::to_string(results[0].numel()) + " elements"
                             : std::to_string(results.size()) + " tensors" + (results.size() == 1 ? " without a value" : "")));
    }
    return std::move(results[0]);
  }

 private:
  std::function<bool(tensors&, tensors&)> call_;
  std::string takes_;  // counts of tensors that the callable takes, in words
  std::vector<std::string> side_inputs_;
  bool weighed_ = true;
};

}  // namespace chevron
