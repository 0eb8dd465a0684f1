#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/train/optimizer_state.hpp>

/// \file
/// Copies all that an optimizer step changes, so that the step can be undone to the last bit.

namespace chevron::detail {

/// Parameters, optimizer state and learning rates of one rank before a step. The first `take` allocates the copies; later calls
/// reuse the memory.
class optimizer_snapshot {
 public:
  /// Copies parameters, state and learning rates of all groups.
  void take(torch::optim::Optimizer& optimizer) {
    at::NoGradGuard const off;
    used_ = 0;
    rates_.clear();
    states_.clear();
    for (auto& group : optimizer.param_groups()) {
      rates_.push_back(group.options().get_lr());
      for (at::Tensor const& p : group.params()) {
        keep(p, p);
        auto const found = optimizer.state().find(p.unsafeGetTensorImpl());
        if (found == optimizer.state().end()) {
          states_.push_back(nullptr);
          continue;
        }
        // The clone copies the state's numbers and shares the state's tensors, whose values `keep` copies.
        states_.push_back(found->second->clone());
        for (at::Tensor const& t : tensors_of(*states_.back())) keep(p, t);
      }
    }
  }

  /// Restores parameters, state and learning rates of the last `take`, into the tensors that `take` copied.
  void put_back(torch::optim::Optimizer& optimizer) {
    at::NoGradGuard const off;
    std::size_t next = 0, rate = 0, state = 0;
    auto const restore = [&](at::Tensor const& t) {
      at::Tensor const& kept = copies_[next++];
      if (t.defined()) t.copy_(kept);
    };
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(rates_[rate++]);
      for (at::Tensor const& p : group.params()) {
        restore(p);
        auto& before = states_[state++];
        if (before == nullptr) {
          optimizer.state().erase(p.unsafeGetTensorImpl());
          continue;
        }
        for (at::Tensor const& t : tensors_of(*before)) restore(t);
        optimizer.state()[p.unsafeGetTensorImpl()] = std::move(before);
      }
    }
  }

  /// Records the versions of parameters and states, for `changed`.
  void note_versions(torch::optim::Optimizer& optimizer) {
    versions_.clear();
    each_version(optimizer, [this](at::Tensor const&, std::uint64_t version) { versions_.push_back(version); });
  }
  /// \returns the first parameter that was written, or whose state was written, since `note_versions`; undefined if none was. A
  /// write through `data()` changes no version and is not noticed.
  at::Tensor changed(torch::optim::Optimizer& optimizer) const {
    at::Tensor found;
    std::size_t next = 0;
    each_version(optimizer, [&](at::Tensor const& p, std::uint64_t version) {
      bool const same = next < versions_.size() && versions_[next] == version;
      ++next;
      if (!same && !found.defined()) found = p;
    });
    return found;
  }

  /// Calls `see(address of the parameter's TensorImpl, copy)` for each copy of a parameter and of its state's tensors.
  template <class See>
  void each_copy(See const& see) const {
    for (std::size_t i = 0; i < used_; ++i) see(owners_[i], copies_[i]);
  }

 private:
  void keep(at::Tensor const& owner, at::Tensor const& t) {
    if (used_ == copies_.size()) {
      copies_.emplace_back();
      owners_.emplace_back();
    }
    owners_[used_] = owner.unsafeGetTensorImpl();
    at::Tensor& copy = copies_[used_++];
    if (!t.defined()) return copy.reset();
    if (copy.defined() && copy.sizes() == t.sizes() && copy.scalar_type() == t.scalar_type() && copy.device() == t.device()) {
      copy.copy_(t);
    } else {
      copy = t.detach().clone();
    }
  }

  /// Calls `see(parameter, version)` for each parameter. The version changes with each in-place operation on parameter or
  /// state, and when their memory moves to another address.
  template <class See>
  static void each_version(torch::optim::Optimizer& optimizer, See const& see) {
    for (auto& group : optimizer.param_groups()) {
      for (at::Tensor const& p : group.params()) {
        std::uint64_t mark = 0;
        auto const add = [&](at::Tensor const& t) {
          if (!t.defined() || t.is_inference()) return;
          mark = (mark ^ reinterpret_cast<std::uintptr_t>(t.const_data_ptr())) * 0x9e3779b97f4a7c15u +
                 static_cast<std::uint64_t>(t._version());
        };
        add(p);
        auto const found = optimizer.state().find(p.unsafeGetTensorImpl());
        if (found != optimizer.state().end()) {
          for (at::Tensor const& t : tensors_of(*found->second)) add(t);
        }
        see(p, mark);
      }
    }
  }

  std::vector<std::uint64_t> versions_;                                     // by parameter
  std::vector<double> rates_;                                               // by group
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states_;  // by parameter; null: no state at `take`
  std::vector<at::Tensor> copies_;                                          // parameter, then its state's tensors
  std::vector<void const*> owners_;                                         // the parameter of each copy
  std::size_t used_ = 0;
};

}  // namespace chevron::detail
