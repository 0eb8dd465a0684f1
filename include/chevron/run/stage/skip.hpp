#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/companion.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Skip connections: a later stage gets a tensor of an earlier stage as an input; the stages in between do not see the tensor.

namespace chevron {

/// A connection that passes one tensor from stage `from` to stage `to` > `from`.
struct skip {
  int from = 0;  ///< stage that returns the tensor, as an additional output
  int to = 0;    ///< stage that takes the tensor, as an additional input
};

/// Adds skip connections to the stages of a builder. For each connection, in list order, stage `from` returns one more tensor
/// after its other outputs, and stage `to` gets the tensor after its other inputs; the stages in between do not see the tensor.
///
/// The tensor is sent with the messages between neighbouring stages. A direct message would be shorter, but a program's proof
/// is about messages of neighbouring stages: so the proof is valid with skip connections, too, no message is added, and the
/// ranks in between store nothing. Tensors may have any shape and dtype; floating-point tensors get a gradient back.
/// \param build returns a stage without connections, by number \param connections in the order of these tensors
/// \returns a builder for `trainer_setup::stages`
/// \throws usage_error for a connection to a stage that is not later. If a stage returns too few tensors, its first step fails
inline std::function<stage(int)> with_skips(std::function<stage(int)> build, std::vector<skip> connections) {
  for (skip const& c : connections) {
    if (c.from < 0 || c.to <= c.from) {
      throw usage_error("a skip connection from stage " + std::to_string(c.from) + " to stage " + std::to_string(c.to) +
                        ". Remedy: a connection from a stage to a later one");
    }
  }
  return [build = std::move(build), connections = std::move(connections)](int number) {
    stage made = build(number);
    skip_marks marks;
    for (skip const& c : connections) {
      if (c.from < number && number <= c.to) marks.arriving.push_back(number == c.to);
      if (c.from <= number && number < c.to) marks.departing.push_back(number == c.from);
    }
    made.skips(std::move(marks));
    return made;
  };
}

namespace detail {

/// Holds the tensors of one microbatch that are in a stage's messages but bypass the stage, during F; and their gradients,
/// during B or I. These tensors are in no graph.
class passing_tensors final : public companion {
 public:
  /// Removes the passing tensors from the stage's inputs.
  /// \throws usage_error for too few inputs, and for a connection that leads past the last stage
  void begin_forward(stage_call const& task, tensors& arrived) override {
    skip_marks const& marks = task.owner->skips();
    if (task.loss != nullptr && !marks.departing.empty())
      throw usage_error("a skip connection leads past the last stage. Remedy: a connection that ends at this stage or before");
    held_.clear();
    inputs_.clear();
    outputs_.clear();
    if (marks.arriving.empty()) return;
    if (arrived.size() < marks.arriving.size()) {
      throw usage_error("the stage got " + std::to_string(arrived.size()) + " tensors, fewer than the " +
                        std::to_string(marks.arriving.size()) +
                        " of its skip connections. Remedy: each stage returns its outputs, and then a tensor for each connection "
                        "that begins at the stage");
    }
    std::size_t const first = arrived.size() - marks.arriving.size();
    auto const passes = [&](std::size_t i) { return i >= first && !marks.arriving[i - first]; };
    for (std::size_t i = 0; i < arrived.size(); ++i) {
      if (detail::carries_gradient(arrived[i])) inputs_.push_back(passes(i));
    }
    hold(arrived, passes);
  }

  /// Inserts the passing tensors into the stage's outputs.
  /// \throws usage_error where the stage returned too few tensors
  void end_forward(stage_call const& task, tensors& departing) override {
    skip_marks const& marks = task.owner->skips();
    if (marks.departing.empty()) return;
    auto const begun = static_cast<std::size_t>(std::count(marks.departing.begin(), marks.departing.end(), true));
    if (departing.size() < begun) {
      throw usage_error("the stage returned " + std::to_string(departing.size()) + " tensors, but " + std::to_string(begun) +
                        " skip connections begin here. Remedy: return the outputs, and then a tensor for each connection");
    }
    tensors own(std::make_move_iterator(departing.end() - static_cast<std::ptrdiff_t>(begun)),
                std::make_move_iterator(departing.end()));
    departing.resize(departing.size() - begun);
    for (at::Tensor const& t : departing) {
      if (detail::carries_gradient(t)) outputs_.push_back(false);
    }
    auto next_own = own.begin();
    auto next_held = held_.begin();
    for (bool const begins : marks.departing) {
      departing.push_back(std::move(begins ? *next_own++ : *next_held++));
      if (detail::carries_gradient(departing.back())) outputs_.push_back(!begins);
    }
    held_.clear();
  }

  /// Removes the gradients of passing tensors from those of the stage's outputs.
  void begin_backward(stage_call const&, tensors& output_gradients) override {
    if (outputs_.empty()) return;
    hold(output_gradients, [&](std::size_t i) { return i < outputs_.size() && outputs_[i]; });
  }

  /// Inserts the gradients of passing tensors into those of the stage's inputs; drops them if no earlier stage is trained.
  void end_backward(stage_call const& task, tensors& input_gradients) override {
    tensors held = std::exchange(held_, {});
    if (held.empty() || !task.differentiable) return;
    tensors own = std::move(input_gradients);
    input_gradients.clear();
    auto next_own = own.begin();
    auto next_held = held.begin();
    for (bool const passes : inputs_) input_gradients.push_back(std::move(passes ? *next_held++ : *next_own++));
  }

 private:
  /// Moves the passing tensors from a message to `held_`.
  template <class Passes>
  void hold(tensors& message, Passes const& passes) {
    tensors rest;
    for (std::size_t i = 0; i < message.size(); ++i) (passes(i) ? held_ : rest).push_back(std::move(message[i]));
    message = std::move(rest);
  }

  tensors held_;
  std::vector<bool> inputs_, outputs_;  // by floating-point tensor of a message: whether it bypasses the stage
};

}  // namespace detail
}  // namespace chevron
