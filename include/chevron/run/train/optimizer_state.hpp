#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/fused_optimizers.hpp>

/// \file
/// Reads and writes the states of torch::optim's optimizers by parameter, and the options and learning rates of parameter
/// groups. LibTorch has no common interface for states and options, so this file lists the members of each class.

namespace chevron::detail {

/// Calls `tensor(name, value)` for each tensor of a parameter's state, undefined tensors included, and `number(name, value)`
/// for each number, in a fixed order. Both functions may write to `value`.
/// \throws usage_error for a state of another class than those of SGD, Adam, AdamW, RMSprop and Adagrad
template <class OnTensor, class OnNumber>
void visit_state(torch::optim::OptimizerParamState& state, OnTensor&& tensor, OnNumber&& number) {
  namespace optim = torch::optim;
  auto const adam = [&](auto& s) {
    number("step", s.step());
    tensor("exp_avg", s.exp_avg());
    tensor("exp_avg_sq", s.exp_avg_sq());
    tensor("max_exp_avg_sq", s.max_exp_avg_sq());
  };
  if (auto* s = dynamic_cast<optim::SGDParamState*>(&state)) return tensor("momentum_buffer", s->momentum_buffer());
  if (auto* s = dynamic_cast<optim::AdamWParamState*>(&state)) return adam(*s);
  if (auto* s = dynamic_cast<optim::AdamParamState*>(&state)) return adam(*s);
  if (auto* s = dynamic_cast<optim::RMSpropParamState*>(&state)) {
    number("step", s->step());
    tensor("square_avg", s->square_avg());
    tensor("momentum_buffer", s->momentum_buffer());
    return tensor("grad_avg", s->grad_avg());
  }
  if (auto* s = dynamic_cast<optim::AdagradParamState*>(&state)) {
    number("step", s->step());
    return tensor("sum", s->sum());
  }
  throw usage_error(
      "the state of an optimizer of this class is unknown, so a step can neither be undone nor saved. Remedy: SGD, Adam, "
      "AdamW, "
      "RMSprop or Adagrad of torch::optim, or neither post_validation nor checkpoints");
}

/// Calls `number(name, value)` for each option of a parameter group, in a fixed order, the learning rate first; for an unknown
/// class of options, only for the learning rate.
template <class OnNumber>
void visit_options(torch::optim::OptimizerOptions const& options, OnNumber&& number) {
  namespace optim = torch::optim;
  number("learning rate", options.get_lr());
  auto const adam = [&](auto const& o) {
    number("first beta", std::get<0>(o.betas()));
    number("second beta", std::get<1>(o.betas()));
    number("eps", o.eps());
    number("weight decay", o.weight_decay());
    number("amsgrad", o.amsgrad() ? 1.0 : 0.0);
  };
  if (auto const* o = dynamic_cast<optim::AdamWOptions const*>(&options)) return adam(*o);
  if (auto const* o = dynamic_cast<optim::AdamOptions const*>(&options)) return adam(*o);
  if (auto const* o = dynamic_cast<optim::SGDOptions const*>(&options)) {
    number("momentum", o->momentum());
    number("dampening", o->dampening());
    number("weight decay", o->weight_decay());
    return number("nesterov", o->nesterov() ? 1.0 : 0.0);
  }
  if (auto const* o = dynamic_cast<optim::RMSpropOptions const*>(&options)) {
    number("alpha", o->alpha());
    number("eps", o->eps());
    number("weight decay", o->weight_decay());
    number("momentum", o->momentum());
    return number("centered", o->centered() ? 1.0 : 0.0);
  }
  if (auto const* o = dynamic_cast<optim::AdagradOptions const*>(&options)) {
    number("learning rate decay", o->lr_decay());
    number("weight decay", o->weight_decay());
    number("initial accumulator", o->initial_accumulator_value());
    number("eps", o->eps());
  }
}

/// The tensors of a state, in the order of `visit_state`, undefined tensors included.
inline std::vector<at::Tensor> tensors_of(torch::optim::OptimizerParamState& state) {
  std::vector<at::Tensor> all;
  visit_state(
      state, [&](char const*, at::Tensor& t) { all.push_back(t); }, [](char const*, auto&) {});
  return all;
}

/// Returns the kind of an optimizer's state, by torch's name of the class; empty for an unknown class, and for a user's class
/// derived from a known class, since its state may have more members.
inline std::string kind_of(torch::optim::Optimizer const& optimizer) {
  namespace optim = torch::optim;
  std::type_info const& type = typeid(optimizer);
  if (type == typeid(optim::SGD) || type == typeid(fused_sgd)) return "SGD";
  if (type == typeid(optim::AdamW) || type == typeid(fused_adamw)) return "AdamW";
  if (type == typeid(optim::Adam)) return "Adam";
  if (type == typeid(optim::RMSprop)) return "RMSprop";
  if (type == typeid(optim::Adagrad)) return "Adagrad";
  return "";
}

/// Returns an optimizer's class name, for messages and comparisons. Two classes of one kind round differently, so copies of a
/// parameter must be stepped by one class.
inline std::string class_name_of(torch::optim::Optimizer const& optimizer) {
  std::type_info const& type = typeid(optimizer);
  if (type == typeid(fused_sgd)) return "fused_sgd";
  if (type == typeid(fused_adamw)) return "fused_adamw";
  std::string const kind = kind_of(optimizer);
  return kind.empty() ? type.name() : kind;
}

/// Returns an empty state of a kind; null for an unknown kind. \param kind a name that `kind_of` returns
inline std::unique_ptr<torch::optim::OptimizerParamState> empty_state(std::string const& kind) {
  namespace optim = torch::optim;
  if (kind == "SGD") return std::make_unique<optim::SGDParamState>();
  if (kind == "AdamW") return std::make_unique<optim::AdamWParamState>();
  if (kind == "Adam") return std::make_unique<optim::AdamParamState>();
  if (kind == "RMSprop") return std::make_unique<optim::RMSpropParamState>();
  if (kind == "Adagrad") return std::make_unique<optim::AdagradParamState>();
  return nullptr;
}

}  // namespace chevron::detail

namespace chevron::detail {

/// Returns the learning rates by group; empty without an optimizer.
inline std::vector<double> group_rates(torch::optim::Optimizer const* optimizer) {
  std::vector<double> out;
  if (optimizer == nullptr) return out;
  for (auto const& group : optimizer->param_groups()) out.push_back(group.options().get_lr());
  return out;
}

/// Sets the learning rates, by group.
inline void set_group_rates(torch::optim::Optimizer& optimizer, std::vector<double> const& rates) {
  for (std::size_t g = 0; g < rates.size(); ++g) optimizer.param_groups()[g].options().set_lr(rates[g]);
}
/// Sets one learning rate for all groups.
inline void set_group_rates(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

/// Checks that all groups have one learning rate: a schedule of rates sets one rate for all groups. \throws usage_error if not
inline void check_one_rate(torch::optim::Optimizer const& optimizer) {
  std::vector<double> const each = group_rates(&optimizer);
  for (double const rate : each) {
    if (rate == each[0]) continue;
    auto const [first, other] = texts_apart(each[0], rate);
    throw usage_error("the optimizer's groups have learning rates " + first + " and " + other +
                      ", and trainer_options::learning_rate would give all of them one. Remedy: one rate for all groups, or no "
                      "such function, and the rates set by hand before each step");
  }
}

/// Words for a learning rate that no step can use, with the rate; empty for any other.
/// \param stepped the groups that are stepped with the rate: LibTorch converts it to the type of each parameter
inline std::string fault_of_rate(double rate, std::span<torch::optim::OptimizerParamGroup const> stepped) {
  constexpr double most_of_half = 65504;
  bool half = false;
  if (rate > most_of_half) {
    for (auto const& group : stepped) {
      for (at::Tensor const& p : group.params()) half = half || p.scalar_type() == at::kHalf;
    }
  }
  if (rate >= 0 && rate <= (half ? most_of_half : std::numeric_limits<float>::max())) return "";
  std::string const number = number_text(rate) + " for this step: ";
  if (!std::isfinite(rate)) return number + "parameters would be lost";
  if (rate < 0) return number + "the loss would be maximized";
  return number + (half ? "in float16, the type of parameters, it is infinite" : "in single precision it is infinite");
}

/// Returns the learning rate of a step: `schedule(step)`, or without a schedule the rate of the optimizer's first group, or 0
/// without an optimizer.
/// \throws usage_error if the schedule returns a rate that no step can use
inline double rate_of_step(std::function<double(long step)> const& schedule, long step, torch::optim::Optimizer const* optimizer,
                           error_context const& here) {
  if (!schedule) return optimizer != nullptr ? optimizer->param_groups().front().options().get_lr() : 0;
  double const rate = schedule(step);
  using groups = std::span<torch::optim::OptimizerParamGroup const>;
  std::string const fault = fault_of_rate(rate, optimizer != nullptr ? groups(optimizer->param_groups()) : groups());
  if (fault.empty()) return rate;
  throw usage_error("trainer_options::learning_rate gives " + fault + ". Remedy: a number from 0 for each step", here);
}

}  // namespace chevron::detail
