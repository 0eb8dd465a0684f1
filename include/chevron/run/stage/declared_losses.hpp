#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/companion.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_loss.hpp>

/// \file
/// Losses that a stage declares, and that its forward passes to `add_loss`: they leave the graphs of the stage's sections.

namespace chevron::detail {

/// \throws usage_error for a loss that a stage passes to `add_loss` and does not declare
inline void check_declared(stage const& owner, std::string const& name) {
  auto const same = [&](stage_loss const& l) { return l.name == name; };
  if (std::any_of(owner.losses().begin(), owner.losses().end(), same)) return;
  throw usage_error("the stage gives loss `" + name + "`, which it does not declare. Remedy: .losses({{.name = \"" + name +
                    "\"}}) of the stage that is built");
}

/// Records the losses that a section's forward passes to `add_loss`. From F to the backward it stores their dtypes, not their
/// values.
class section_losses {
 public:
  /// Records the losses of a forward, which the stage declares.
  void note(stage const& owner, std::span<collected_losses::given const> given) {
    given_.clear();
    for (collected_losses::given const& one : given) {
      auto const same = [&](stage_loss const& l) { return l.name == one.name; };
      auto const declared = std::find_if(owner.losses().begin(), owner.losses().end(), same);
      given_.push_back(
          {static_cast<std::size_t>(declared - owner.losses().begin()), one.value.scalar_type(), one.value.reshape({})});
    }
  }
  /// Adds the recorded values to the stage's losses. \param of_stage an entry for each declared loss; undefined: no value yet
  void add_to(tensors& of_stage) const {
    at::AutoGradMode const without(false);
    for (given_loss const& one : given_) {
      at::Tensor& sum = of_stage[one.declared];
      at::Tensor const value = one.value.detach();
      sum = sum.defined() ? at::add(sum, value) : value;
    }
  }
  /// Adds the losses to the graph's outputs, at the end.
  /// \throws usage_error for a loss that depends on no trained parameter
  void leave(stage const& owner, stage_graph& graph) const {
    for (given_loss const& one : given_) {
      if (!one.value.requires_grad()) {
        throw usage_error("loss `" + owner.losses()[one.declared].name +
                          "` depends on no parameter that is trained: nothing would be learned by it. Remedy: a value computed "
                          "from trained parameters; in a microbatch without this loss no add_loss, and a weight of 0");
      }
      graph.leave(std::span(&one.value, 1));
    }
  }
  void drop_values() {
    for (given_loss& one : given_) one.value = at::Tensor();
  }

  /// Whether the forward passed a loss to `add_loss`. \param declared the loss's index among the stage's losses
  bool gave(std::size_t declared) const {
    return std::any_of(given_.begin(), given_.end(), [&](given_loss const& one) { return one.declared == declared; });
  }
  /// Appends the gradients of losses to the gradients of the outputs.
  /// \param seeds the gradient of each declared loss; undefined: the microbatch counts nothing in the loss
  void append_gradients(tensors const& seeds, tensors& output_gradients) const {
    for (given_loss const& one : given_) {
      at::Tensor const& seed = seeds[one.declared];
      output_gradients.push_back(seed.defined() ? seed.to(one.dtype) : seed);
    }
  }

 private:
  struct given_loss {
    std::size_t declared;  // index among the stage's losses
    at::ScalarType dtype;
    at::Tensor value;  // with its graph, while the forward runs
  };
  std::vector<given_loss> given_;  // in the order of the calls
};

/// The declared losses of a stage for one microbatch.
class declared_losses final : public companion {
 public:
  void begin_forward(stage_call const& task, tensors&) override {
    values_.assign(task.owner->losses().size(), at::Tensor());
    sections_.clear();
  }
  /// Moves the values to `task.losses`; undefined for a loss that the forward did not pass.
  void end_forward(stage_call const& task, tensors&) override {
    if (task.losses != nullptr) *task.losses = std::move(values_);
  }
  /// \throws usage_error for a declared loss that the forward did not pass to `add_loss`
  void begin_backward(stage_call const& task, tensors&) override {
    for (std::size_t k = 0; k < task.loss_seeds.size(); ++k) {
      auto const gave = [&](section_losses const& s) { return s.gave(k); };
      if (!task.loss_seeds[k].defined() || std::any_of(sections_.begin(), sections_.end(), gave)) continue;
      std::string const& name = task.owner->losses()[k].name;
      throw usage_error("the stage declares loss `" + name + "`, and its forward gave none. Remedy: chevron::add_loss(\"" + name +
                        "\", value) in the forward, or a weight of 0 for microbatches without it");
    }
  }

  void after(stage_call const& task, section_parts const& of, std::span<collected_losses::given const> given) override {
    if (sections_.size() <= of.number) sections_.resize(of.number + 1);
    sections_[of.number].note(*task.owner, given);
  }
  void leave(stage_call const& task, section_parts const& of, stage_graph& graph) const override {
    sections_[of.number].leave(*task.owner, graph);
  }
  void settle(section_parts const& of) override {
    sections_[of.number].add_to(values_);
    sections_[of.number].drop_values();
  }
  void end_again(section_parts const& of) override { sections_[of.number].drop_values(); }
  void append_gradients(stage_call const& task, section_parts const& of, tensors& output_gradients) const override {
    sections_[of.number].append_gradients(task.loss_seeds, output_gradients);
  }

 private:
  tensors values_;  // of F, in the order of declaration
  std::vector<section_losses> sections_;
};

}  // namespace chevron::detail
