#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/master_parameters.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// Finds parameters that a step of the optimizer made infinite or NaN, although all gradients were finite.

namespace chevron::detail {

/// Checks the tensors that this rank's optimizer steps: parameters, masters and rounded masters must be finite, and the
/// optimizer's state must contain no NaN. (An infinite state is harmless: a second moment that overflows stops its element
/// alone, and any other infinite state makes the parameter infinite in the same step.) From such values no later step is right:
/// the next losses are not finite, and a step that is skipped changes nothing.
///
/// A check reads each of these tensors once. It runs where a loss or gradient is not finite, before a save, and in each n-th
/// step.
class finite_parameters {
 public:
  /// A tensor that is not finite.
  struct lost {
    at::Tensor stepped;  ///< the tensor in the optimizer's groups; undefined: none was found
    std::string kept;    ///< name of the tensor of its state that contains the NaN; empty: the tensor itself
  };

  /// Asks for the largest magnitudes of all tensors.
  /// \param numbers receives the requests \param flag receives 1 when `numbers` is read, if a value is not finite
  static void ask(torch::optim::Optimizer& optimizer, master_parameters const& masters, scalar_reader& numbers, double& flag) {
    looked_at const all = tensors_to_look_at(optimizer, masters);
    numbers.ask(largest(all.values), [&flag, nan_alone = all.nan_alone](std::span<double const> values) {
      for (std::size_t i = 0; i < values.size(); ++i) flag = is_lost(values[i], nan_alone[i]) ? 1 : flag;
    });
  }

  /// Finds the first tensor that is not finite. The host waits for the device.
  /// \param optimizer null on a rank without trained parameters
  static lost find(torch::optim::Optimizer* optimizer, master_parameters const& masters) {
    if (optimizer == nullptr) return {};
    looked_at const all = tensors_to_look_at(*optimizer, masters);
    lost found;
    scalar_reader numbers;
    numbers.ask(largest(all.values), [&](std::span<double const> values) {
      for (std::size_t i = 0; i < values.size() && !found.stepped.defined(); ++i) {
        if (is_lost(values[i], all.nan_alone[i])) found = {all.stepped[i], all.kept[i]};
      }
    });
    numbers.read();
    return found;
  }

 private:
  struct looked_at {
    tensors values, stepped;
    std::vector<std::string> kept;
    std::vector<bool> nan_alone;
  };

  static bool is_lost(double largest, bool nan_alone) { return nan_alone ? std::isnan(largest) : !std::isfinite(largest); }

  static looked_at tensors_to_look_at(torch::optim::Optimizer& optimizer, master_parameters const& masters) {
    looked_at out;
    auto const add = [&](at::Tensor const& stepped, at::Tensor const& value, std::string kept, bool nan_alone) {
      bool const is_read = value.defined() && value.numel() > 0 && value.layout() == at::kStrided && !value.is_meta() &&
                           (value.is_floating_point() || value.is_complex());
      if (!is_read) return;
      out.values.push_back(value.detach());
      out.stepped.push_back(stepped);
      out.kept.push_back(std::move(kept));
      out.nan_alone.push_back(nan_alone);
    };
    bool const known = !kind_of(optimizer).empty();
    for (auto const& group : optimizer.param_groups()) {
      for (at::Tensor const& p : group.params()) {
        add(p, p, "", false);
        add(p, masters.rounded(p), "", false);
        auto const found = known ? optimizer.state().find(p.unsafeGetTensorImpl()) : optimizer.state().end();
        if (found == optimizer.state().end()) continue;
        visit_state(
            *found->second, [&](char const* name, at::Tensor& t) { add(p, t, name, true); }, [](char const*, auto&) {});
      }
    }
    return out;
  }

  /// The largest magnitude of each tensor, NaN if the tensor contains one, as scalars on the tensor's device.
  static tensors largest(tensors const& all) {
    at::NoGradGuard const off;
    tensors out;
    for (at::Tensor const& t : all)
      out.push_back(at::linalg_vector_norm(t, std::numeric_limits<double>::infinity()).to(at::kDouble));
    return out;
  }
};

/// Finds parameters that are not finite in every n-th step after the first. Made only if `trainer_options::check_copies` asks.
class finite_of_step final : public step_part {
 public:
  /// \param every number of steps from one check to the next \param optimizer null on a rank without trained parameters
  /// \param masters must outlive this object
  finite_of_step(record& to, topology const& where, int every, torch::optim::Optimizer* optimizer,
                 master_parameters const& masters)
      : world_(where.world()), every_(every), optimizer_(optimizer), masters_(&masters), lost_(to.add()) {}

  void complete(record& mine, scalar_reader& numbers) override {
    bool const due = steps_ > 0 && steps_ % every_ == 0;
    ++steps_;
    if (due && optimizer_ != nullptr) finite_parameters::ask(*optimizer_, *masters_, numbers, mine[lost_]);
  }
  void judge(records_of_ranks const& all, decision& found, step_report&, error_context const&) override {
    for (int r = 0; r < world_; ++r) found.parameter_lost = found.parameter_lost || all.at(r, lost_) != 0;
  }

 private:
  int world_, every_;
  torch::optim::Optimizer* optimizer_;
  master_parameters const* masters_;
  record::field lost_;
  long steps_ = 0;
};

}  // namespace chevron::detail
