#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

#include <torch/optim/optimizer.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/number_text.hpp>

/// \file
/// The learning rates of an optimizer's parameter groups.

namespace chevron::detail {

/// The learning rates by group; empty without an optimizer.
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

/// \throws usage_error where groups have several rates, which a schedule would replace by one
inline void check_one_rate(torch::optim::Optimizer const& optimizer) {
  std::vector<double> const each = group_rates(&optimizer);
  for (double const rate : each) {
    if (rate == each[0]) continue;
    throw usage_error("the optimizer's groups have learning rates " + number_text(each[0]) + " and " + number_text(rate) +
                      ", and trainer_options::learning_rate would give all of them one. Remedy: one rate for all groups, or no "
                      "such function, and the rates set by hand before each step");
  }
}

/// The rate of a step: the schedule's, or without one that of the optimizer's first group, or 0 without either.
/// \throws usage_error for a schedule's rate that is not finite
inline double rate_of_step(std::function<double(long step)> const& schedule, long step, torch::optim::Optimizer const* optimizer,
                           error_context const& here) {
  if (!schedule) return optimizer != nullptr ? optimizer->param_groups().front().options().get_lr() : 0;
  double const rate = schedule(step);
  if (std::isfinite(rate)) return rate;
  throw usage_error("trainer_options::learning_rate gives " + number_text(rate) + " for this step: parameters would be lost",
                    here);
}

}  // namespace chevron::detail
