#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// Calls the factory of a rank's optimizer, and checks the optimizer that the factory makes.

namespace chevron::detail {

/// Checks an optimizer. \throws usage_error for LBFGS, for an unknown class with post-validation, and for several learning
/// rates with `trainer_options::learning_rate`
inline void check_optimizer(torch::optim::Optimizer const& optimizer, trainer_options const& options) {
  if (dynamic_cast<torch::optim::LBFGS const*>(&optimizer) != nullptr) {
    throw usage_error(
        "LBFGS wants the gradient several times in a step, and a step here computes it once. Remedy: SGD, Adam, AdamW, RMSprop "
        "or Adagrad of torch::optim");
  }
  if (options.post_validation && kind_of(optimizer).empty()) {
    throw usage_error(
        "the state of an optimizer of this class is unknown, so a step cannot be undone. Remedy: SGD, Adam, AdamW, RMSprop or "
        "Adagrad of torch::optim, or no post_validation");
  }
  if (options.learning_rate) check_one_rate(optimizer);
}

/// The stage and name of a parameter, for errors; `a parameter` for any other tensor.
inline std::string words_for(std::vector<named_parameter> const& all, at::Tensor const& p) {
  for (named_parameter const& one : all) {
    if (one.value.is_same(p)) return "stage " + std::to_string(one.stage) + "'s " + one.name;
  }
  return "a parameter";
}

/// The first parameter of which this rank has a piece; null: all are whole.
inline named_parameter const* first_piece(std::vector<named_parameter> const& all) {
  auto const found = std::find_if(all.begin(), all.end(), [](named_parameter const& p) { return p.is_piece; });
  return found == all.end() ? nullptr : &*found;
}

/// Checks that `before_optimizer_step` may be called with this rank's parameters. \throws usage_error where it would be given
/// pieces, without `element_wise_hook`
inline void check_hook(std::vector<named_parameter> const& parameters, trainer_options const& options) {
  named_parameter const* const piece =
      options.before_optimizer_step && !options.element_wise_hook ? first_piece(parameters) : nullptr;
  if (piece == nullptr) return;
  throw usage_error("before_optimizer_step would be given a piece of " + words_for(parameters, piece->value) +
                    ", which is cut along dimension " + std::to_string(piece->cut_along) +
                    ": a norm or a sum of it would be that of the piece. Remedy: trainer_options::element_wise_hook if the "
                    "function treats each element by itself, or combines pieces (named_parameter::is_piece)");
}

/// Calls the optimizer's factory, and checks the result.
/// \param parameters that this rank trains \param stepped the tensors for the factory: the parameters, or masters in their place
/// \returns the optimizer; null if the rank trains no parameter
/// \throws usage_error if the factory returns null, an optimizer that steps a parameter with a master, or an optimizer that may
/// need whole tensors where this rank has pieces; and as `check_optimizer`
inline std::unique_ptr<torch::optim::Optimizer> call_factory(optimizer_factory const& make,
                                                             std::vector<named_parameter> const& parameters,
                                                             std::vector<named_parameter> const& stepped,
                                                             trainer_options const& options) {
  if (parameters.empty()) return nullptr;
  auto out = make(stepped);
  if (!out) throw usage_error("the optimizer factory gave no optimizer");
  std::set<void const*> replaced;  // parameters with a master
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor const& p = parameters[i].value;
    if (!stepped[i].value.is_same(p)) replaced.insert(p.unsafeGetTensorImpl());
  }
  for (auto const& group : out->param_groups()) {
    for (at::Tensor const& p : group.params()) {
      if (!replaced.contains(p.unsafeGetTensorImpl())) continue;
      throw usage_error("the optimizer factory gave the optimizer " + words_for(parameters, p) + " in " +
                        c10::toString(p.scalar_type()) +
                        ", and with master_parameters its gradient goes to its float32 master. Remedy: step the tensors that the "
                        "factory is given, or no master_parameters");
    }
  }
  check_optimizer(*out, options);
  named_parameter const* const piece = make.steps_pieces() || !kind_of(*out).empty() ? nullptr : first_piece(parameters);
  if (piece != nullptr) {
    throw usage_error("an optimizer of a class of its own may need whole tensors, and of " + words_for(parameters, piece->value) +
                      " this rank has a piece, cut along dimension " + std::to_string(piece->cut_along) +
                      ". Remedy: chevron::element_wise(…) around the factory if the optimizer steps each element by itself, or "
                      "combines pieces (named_parameter::is_piece)");
  }
  return out;
}

/// Warns on rank 0 of trained parameters that are in no group of the optimizers. Collective.
/// \param optimizer before its parameters are divided into shares; null on a rank without trained parameters
/// \param stepped the tensors that the factory was given
inline void warn_of_left_out(transport& comm, torch::optim::Optimizer const* optimizer,
                             std::vector<named_parameter> const& stepped) {
  std::set<void const*> in_groups;
  if (optimizer != nullptr) {
    for (auto const& group : optimizer->param_groups()) {
      for (at::Tensor const& p : group.params()) in_groups.insert(p.unsafeGetTensorImpl());
    }
  }
  agreement mine;
  for (named_parameter const& p : stepped) {
    if (!in_groups.contains(p.value.unsafeGetTensorImpl())) mine.add({words_for(stepped, p.value)});
  }
  std::set<std::string> seen;
  std::string first;
  for (agreement_row const& row : mine.gather(comm)) {
    if (seen.insert(row[0]).second && seen.size() <= 3) first += (first.empty() ? "" : ", ") + row[0];
  }
  if (seen.empty() || comm.topology().global_rank != 0) return;
  TORCH_WARN("no group of the optimizers contains ", first,
             seen.size() > 3 ? " and " + std::to_string(seen.size() - 3) + " more" : "",
             ": values stay as they are, while gradients are computed, and count in the norm. Remedy: a group for each parameter "
             "that shall train, requires_grad_(false) on any other before the trainer is made");
}

}  // namespace chevron::detail
