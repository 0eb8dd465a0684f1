#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/train/optimizer_factory.hpp>

#include "object.hpp"

/// \file
/// A `torch.optim.Optimizer` of Python behind the interface of C++.

namespace chevron_pipelining {

/// The options of a group: its learning rate is read from, and written to, Python's `param_groups`.
class python_options final : public torch::optim::OptimizerCloneableOptions<python_options> {
 public:
  explicit python_options(object group = nullptr) : group_(std::move(group)) {}  ///< null: the caller's, whose rate is unknown
  double get_lr() const override {
    if (!group_) return 0;
    return in_python([&] { return of(group_)["lr"].cast<double>(); });
  }
  void set_lr(double const rate) override {
    if (!group_) return;
    in_python([&] { return of(group_)["lr"] = rate, 0; });
  }

 private:
  object group_;
};

/// Steps the optimizer of Python; nothing where the caller steps it after the schedule's `step`.
class python_optimizer final : public torch::optim::Optimizer {
 public:
  python_optimizer(object step, std::vector<torch::optim::OptimizerParamGroup> const& groups)
      : Optimizer(groups, std::make_unique<python_options>()), step_(std::move(step)) {}
  at::Tensor step(LossClosure) override {
    if (step_) in_python([&] { return of(step_)(), 0; });
    return {};
  }

 private:
  object step_;
};

/// Makes this rank's optimizer. \param given an optimizer of Python; None: the caller steps
inline chevron::optimizer_factory factory_of(object given) {
  return [given = std::move(given)](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return in_python([&]() -> std::unique_ptr<torch::optim::Optimizer> {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      py::object const optimizer = of(given);
      if (optimizer.is_none()) {
        groups.emplace_back(std::move(parameters), std::make_unique<python_options>());
        return std::make_unique<python_optimizer>(nullptr, groups);
      }
      for (py::handle const group : optimizer.attr("param_groups")) {
        groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>(), std::make_unique<python_options>(own(group)));
      }
      return std::make_unique<python_optimizer>(own(optimizer.attr("step")), groups);
    });
  };
}

}  // namespace chevron_pipelining
