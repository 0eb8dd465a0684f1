#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/fused_optimizers.hpp>
#include <chevron/run/train/optimizer_state.hpp>

/// \file
/// Finds calls on a trainer's optimizer that only a loop without a trainer makes: `step()`, `add_param_group()`.

namespace chevron::detail {

/// Checks, before each step, the optimizer that `trainer::optimizer` gives to the caller. The groups must contain only tensors
/// that they contained when the trainer was made: of any other tensor no gradient is set to zero, summed or clipped, and no
/// value is saved. The caller must not have stepped the optimizer, which would apply the step's gradients twice.
///
/// A call of `step()` is found by what it leaves: a higher step count in the state of Adam, AdamW, RMSprop and Adagrad; momentum
/// written as often as a step writes it; the count of calls of `fused_sgd`. Plain SGD leaves nothing but the values, of which a
/// few float elements are compared on the CPU. Steps of other classes, and of plain SGD on an accelerator, are not found.
class optimizer_calls {
 public:
  optimizer_calls() = default;
  /// \param of the rank's optimizer, with the tensors that it steps; null on a rank without trained parameters
  explicit optimizer_calls(torch::optim::Optimizer const* of) {
    if (of == nullptr) return;
    for (auto const& group : of->param_groups()) {
      for (at::Tensor const& p : group.params()) known_.insert(p.unsafeGetTensorImpl());
    }
    sum_ = sum_of(*of);
  }

  /// Checks the tensors in the groups. \throws usage_error for a tensor that was added, or is in two places
  void check_groups(torch::optim::Optimizer const* of, error_context const& here) {
    if (of == nullptr) return;
    std::uint64_t const sum = sum_of(*of);
    if (sum == sum_) return;
    std::set<void const*> seen;
    for (std::size_t g = 0; g < of->param_groups().size(); ++g) {
      for (at::Tensor const& p : of->param_groups()[g].params()) {
        void const* const key = p.unsafeGetTensorImpl();
        bool const known = known_.contains(key);
        if (known && seen.insert(key).second) continue;
        std::ostringstream sizes;
        sizes << p.sizes();
        throw usage_error("the optimizer's group " + std::to_string(g) + " has a tensor of sizes " + sizes.str() +
                              (known ? ", which the groups contain twice"
                                     : " that it did not have when the trainer was made, so that its gradient would be neither "
                                       "set to zero nor summed over replicas, and no checkpoint would contain it") +
                              ". Remedy: register the parameter in its stage's module before the trainer is made, in a group "
                              "with the rate 0 while it shall not train; or make a new trainer, from a checkpoint with "
                              "load_options::allow_other_trained",
                          here);
      }
    }
    sum_ = sum;  // the caller removed tensors, or moved them to another group
  }

  /// Checks the groups' rates. \throws usage_error for a rate that is negative, or is no number in single precision
  static void check_rates(torch::optim::Optimizer const* of, error_context const& here) {
    if (of == nullptr) return;
    for (std::size_t g = 0; g < of->param_groups().size(); ++g) {
      auto const& group = of->param_groups()[g];
      if (std::string const why = fault_of_rate(group.options().get_lr(), {&group, 1}); !why.empty()) {
        throw usage_error("group " + std::to_string(g) + " of the optimizer has the learning rate " + why +
                              ". Remedy: options().set_lr() with a number from 0",
                          here);
      }
    }
  }

  /// Records what a step of the caller would change. To be called at the end of each of the trainer's steps.
  void note(torch::optim::Optimizer* of) {
    marks_.clear();
    elements_.clear();
    calls_.reset();
    if (of == nullptr) return;
    if (auto const* fused = dynamic_cast<fused_sgd const*>(of)) {
      calls_ = fused->calls();
      return;
    }
    bool const plain = kind_of(*of) == "SGD";
    if (!plain && kind_of(*of).empty()) return;
    for (auto const& group : of->param_groups()) {
      auto const& options = group.options();
      int more = plain ? most_samples : 1;
      for (at::Tensor const& p : group.params()) {
        if (!p.grad().defined()) continue;  // which a step leaves out
        auto const found = of->state().find(p.unsafeGetTensorImpl());
        if (found != of->state().end()) {
          marks_.push_back(mark_of(p.unsafeGetTensorImpl(), *found->second));
        } else if (plain) {
          note_element(p, static_cast<torch::optim::SGDOptions const&>(options));
        }
        if (--more == 0) break;
      }
    }
  }

  /// Checks that the caller has not stepped the optimizer since `note`. \param step number of the last step
  /// \throws usage_error if so
  void check_not_stepped(torch::optim::Optimizer* of, long step, error_context const& here) const {
    if (of == nullptr || !was_stepped(*of)) return;
    throw usage_error("the optimizer was stepped by a call of optimizer()->step() after step " + std::to_string(step) +
                          ": the trainer's step() steps the optimizer itself, and the gradients were applied twice. Remedy: no "
                          "such call; set rates in optimizer()->param_groups() or by trainer_options::learning_rate, and change "
                          "gradients in trainer_options::before_optimizer_step",
                      here);
  }

 private:
  static constexpr int most_samples = 4;  // of a group

  static c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> undefined() { return {}; }
  /// A parameter's state at the end of a step: the count of steps, or the version of the momentum.
  struct mark {
    void* parameter = nullptr;
    std::int64_t steps = -1, version = -1;
    /// The state's first tensor. The reference keeps its address from being used again, by the tensor of a state that was loaded.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor{undefined()};
  };
  /// The first element of a parameter that plain SGD steps, before and after another step with the same gradient.
  struct element {
    at::Tensor of;
    double before, after, margin;
    std::int64_t version;
  };

  static std::uint64_t sum_of(torch::optim::Optimizer const& of) {
    std::uint64_t sum = 0;
    for (auto const& group : of.param_groups()) {
      for (at::Tensor const& p : group.params()) {
        std::uint64_t const mixed = reinterpret_cast<std::uintptr_t>(p.unsafeGetTensorImpl()) * 0x9e3779b97f4a7c15u;
        sum += mixed ^ (mixed >> 32);
      }
    }
    return sum;
  }

  static mark mark_of(void* parameter, torch::optim::OptimizerParamState& state) {
    mark out{.parameter = parameter};
    bool first = true;
    visit_state(
        state,
        [&](char const*, at::Tensor& t) {
          if (!t.defined() || !std::exchange(first, false)) return;
          out.tensor = t.getIntrusivePtr();
          out.version = t._version();
        },
        [&](char const*, auto const& number) { out.steps = static_cast<std::int64_t>(number); });
    return out;
  }

  static double first_element(at::Tensor const& t) {
    return t.scalar_type() == at::kFloat ? static_cast<double>(*t.const_data_ptr<float>()) : *t.const_data_ptr<double>();
  }
  void note_element(at::Tensor const& p, torch::optim::SGDOptions const& options) {
    at::Tensor const& gradient = p.grad();
    bool const is_float = p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble;
    bool const is_read = is_float && p.is_cpu() && p.numel() > 0 && gradient.scalar_type() == p.scalar_type();
    if (options.momentum() != 0 || !is_read) return;
    double const before = first_element(p);
    double const change = -options.lr() * (first_element(gradient) + options.weight_decay() * before);
    double const margin = 4e-7 * (std::abs(before) + std::abs(change));
    if (std::abs(change) > 4 * margin) elements_.push_back({p, before, before + change, margin, p._version()});
  }

  bool was_stepped(torch::optim::Optimizer& of) const {
    if (calls_) return static_cast<fused_sgd const&>(of).calls() > *calls_;
    bool momentum = false, written = true;
    for (mark const& before : marks_) {
      auto const found = of.state().find(before.parameter);
      if (found == of.state().end()) continue;
      mark const now = mark_of(before.parameter, *found->second);
      bool const same = now.tensor.lock() == before.tensor.lock();
      if (before.steps >= 0) {
        if (same && now.steps > before.steps) return true;
        continue;
      }
      // torch's SGD writes the momentum twice: mul_, add_.
      momentum = true;
      written = written && same && now.version >= before.version + 2;
    }
    if (momentum) return written;
    bool changed = !elements_.empty();
    for (element const& one : elements_) {
      // torch's SGD steps through data(), which leaves the version: any other change by the caller raises it.
      changed = changed && one.of._version() == one.version && std::abs(first_element(one.of) - one.after) <= one.margin;
    }
    return changed;
  }

  std::set<void const*> known_;  // tensors in the groups when the trainer was made
  std::uint64_t sum_ = 0;        // of the count and the addresses of the tensors in the groups
  std::vector<mark> marks_;
  std::vector<element> elements_;
  std::optional<std::int64_t> calls_;  // of a `fused_sgd`
};

}  // namespace chevron::detail
