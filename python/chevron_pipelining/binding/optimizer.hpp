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

/// The options of a group: its learning rate is read from, and written to, Python's `param_groups`, which `load_state_dict`
/// replaces.
class python_options final : public torch::optim::OptimizerCloneableOptions<python_options> {
 public:
  /// \param optimizer null: the caller's, whose rate is unknown \param group index in its `param_groups`
  explicit python_options(object optimizer = nullptr, int group = 0) : optimizer_(std::move(optimizer)), group_(group) {}
  double get_lr() const override {
    if (!optimizer_) return 0;
    return in_python([&] { return group()["lr"].cast<double>(); });
  }
  void set_lr(double const rate) override {
    if (!optimizer_) return;
    in_python([&] { return group()["lr"] = rate, 0; });
  }

 private:
  py::object group() const { return of(optimizer_).attr("param_groups")[py::int_(group_)]; }

  object optimizer_;
  int group_;
};

/// Steps the optimizer of Python; nothing where the caller steps it after the schedule's `step`.
class python_optimizer final : public torch::optim::Optimizer {
 public:
  python_optimizer(object optimizer, std::vector<torch::optim::OptimizerParamGroup> const& groups)
      : Optimizer(groups, std::make_unique<python_options>()), optimizer_(std::move(optimizer)) {}
  at::Tensor step(LossClosure) override {
    // Read anew, as schedulers of rates wrap it.
    if (optimizer_) in_python([&] { return of(optimizer_).attr("step")(), 0; });
    return {};
  }

 private:
  object optimizer_;
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
        groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>(),
                            std::make_unique<python_options>(given, static_cast<int>(groups.size())));
      }
      return std::make_unique<python_optimizer>(given, groups);
    });
  };
}

}  // namespace chevron_pipelining
