#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/optimizer/group_rates.hpp>
#include <chevron/run/optimizer/optimizer_factory.hpp>
#include <chevron/run/optimizer/optimizer_share.hpp>
#include <chevron/run/optimizer/optimizer_snapshot.hpp>
#include <chevron/run/optimizer/optimizer_state.hpp>
#include <chevron/run/optimizer/rank_gradients.hpp>
#include <chevron/run/optimizer/trainer_options.hpp>

/// \file
/// The optimizer of one rank, whole or in shares.

namespace chevron::detail {

/// \throws usage_error for LBFGS, for an unknown class with post-validation, and for several rates with a schedule of rates
inline void check_optimizer(torch::optim::Optimizer const& optimizer, trainer_options const& options) {
  if (dynamic_cast<torch::optim::LBFGS const*>(&optimizer) != nullptr) {
    throw usage_error(
        "LBFGS wants the gradient several times in a step, and a step here computes it once. Remedy: SGD, Adam, AdamW, RMSprop "
        "or Adagrad of torch::optim");
  }
  if (options.post_validation && kind_of(optimizer).empty()) {
    throw usage_error(
        "what this optimizer keeps is not known here, so a step of it cannot be undone. Remedy: SGD, Adam, AdamW, RMSprop or "
        "Adagrad of torch::optim, or no post_validation");
  }
  if (options.learning_rate) check_one_rate(optimizer);
}

/// Makes this rank's optimizer.
/// \param parameters that this rank trains \returns null where the rank trains no parameter
/// \throws usage_error where the factory gives null, and as `check_optimizer`
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(optimizer_factory const& make,
                                                               std::vector<named_parameter> const& parameters,
                                                               trainer_options const& options) {
  if (parameters.empty()) return nullptr;
  auto out = make(parameters);
  if (!out) throw usage_error("the optimizer factory gave no optimizer");
  check_optimizer(*out, options);
  return out;
}

/// Cuts gradients and optimizer into shares, where the options say so.
/// \param optimizer null on a rank without trained parameters \returns null unless the optimizer is sharded
inline std::unique_ptr<optimizer_share> make_share(torch::optim::Optimizer* optimizer, rank_gradients& gradients,
                                                   topology const& where, int first_bucket, trainer_options const& options) {
  if (options.shard == sharding::nothing) return nullptr;
  gradients.cut(optimizer != nullptr && kind_of(*optimizer).empty());
  if (optimizer == nullptr) return nullptr;
  return std::make_unique<optimizer_share>(*optimizer, gradients, where, first_bucket);
}

/// Calls `see(tensor)` for the tensors of a parameter's optimizer state, and for the copies that `before` has of parameter and
/// state.
/// \param piece the piece of the parameter that the optimizer steps; undefined where this rank steps no element
/// \returns false where the layout of the optimizer's state is not known
template <class See>
bool each_tensor_of(torch::optim::Optimizer& optimizer, optimizer_snapshot const& before, at::Tensor const& piece,
                    See const& see) {
  if (kind_of(optimizer).empty()) return false;
  if (!piece.defined()) return true;
  void const* const key = piece.unsafeGetTensorImpl();
  if (auto const found = optimizer.state().find(piece.unsafeGetTensorImpl()); found != optimizer.state().end()) {
    for (at::Tensor const& t : tensors_of(*found->second)) see(t);
  }
  before.each_copy([&](void const* owner, at::Tensor const& copy) {
    if (owner == key) see(copy);
  });
  return true;
}

}  // namespace chevron::detail
