#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/data/stage_loss.hpp>
#include <chevron/run/model/graph/stage_graph.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// The losses that a section's forward passes to `add_loss`: further ends of its graph, at which its backward begins, too.

namespace chevron::detail {

/// Records the losses that a section's forward passes to `add_loss`. From F to the backward it keeps their dtypes, not their
/// values.
class section_losses {
 public:
  /// Records the losses of a forward.
  /// \throws usage_error for a loss that the stage does not declare
  void note(stage const& owner, std::vector<collected_losses::given> const& given) {
    given_.clear();
    values_.clear();
    for (collected_losses::given const& one : given) {
      auto const declared =
          std::find_if(owner.losses().begin(), owner.losses().end(), [&](stage_loss const& l) { return l.name == one.name; });
      if (declared == owner.losses().end()) {
        throw usage_error("it gives loss `" + one.name + "`, which it does not declare. Remedy: .losses({{.name = \"" + one.name +
                          "\"}}) of the stage that is built");
      }
      given_.push_back({static_cast<std::size_t>(declared - owner.losses().begin()), one.value.scalar_type()});
      values_.push_back(one.value.reshape({}));
    }
  }
  /// Adds the values to the stage's losses. \param of_stage one entry for each declared loss; undefined: no value yet
  void add_to(tensors& of_stage) const {
    at::AutoGradMode const without(false);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      at::Tensor& sum = of_stage[given_[i].declared];
      at::Tensor const value = values_[i].detach();
      sum = sum.defined() ? at::add(sum, value) : value;
    }
  }
  /// Adds the losses to the ends of the graph, behind the outputs.
  /// \throws usage_error for a loss that depends on no trained parameter
  void leave(stage const& owner, stage_graph& graph) const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].requires_grad()) {
        throw usage_error("loss `" + owner.losses()[given_[i].declared].name +
                          "` depends on no parameter that is trained: nothing would be learned by it");
      }
      graph.leave(std::span(&values_[i], 1));
    }
  }
  void drop_values() { values_.clear(); }

  /// Whether the forward passed a loss to `add_loss`. \param declared the loss's index among the stage's losses
  bool gave(std::size_t declared) const {
    return std::any_of(given_.begin(), given_.end(), [&](given_loss const& one) { return one.declared == declared; });
  }
  /// Appends the gradients of losses to those of the outputs.
  /// \param seeds the gradient of each declared loss; undefined: the loss has no part in this microbatch
  void append_gradients(tensors const& seeds, tensors& output_gradients) const {
    for (given_loss const& one : given_) {
      at::Tensor const& seed = seeds[one.declared];
      output_gradients.push_back(seed.defined() ? seed.to(one.dtype) : seed);
    }
  }

 private:
  struct given_loss {
    std::size_t declared;  // number among the stage's losses
    at::ScalarType dtype;
  };
  std::vector<given_loss> given_;  // in the order of the calls
  tensors values_;                 // with their graphs, while the forward runs
};

}  // namespace chevron::detail
