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
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_optimizer.hpp>
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
  /// Asks for the largest magnitudes of all tensors.
  /// \param numbers receives the requests \param flag receives 1 when `numbers` is read, if a value is not finite
  static void ask(rank_optimizer const& optimizer, scalar_reader& numbers, double& flag) {
    looked_at const all = tensors_to_look_at(optimizer);
    numbers.ask(largest(all.values), [&flag, nan_alone = all.nan_alone](std::span<double const> values) {
      for (std::size_t i = 0; i < values.size(); ++i) flag = is_lost(values[i], nan_alone[i]) ? 1 : flag;
    });
  }

  /// Finds the first tensor that is not finite. The host waits for the device.
  /// \returns its words: `the optimizer's exp_avg of stage 1's weight`; empty: all are finite
  static std::string find(rank_optimizer const& optimizer) {
    looked_at const all = tensors_to_look_at(optimizer);
    std::string found;
    scalar_reader numbers;
    numbers.ask(largest(all.values), [&](std::span<double const> values) {
      for (std::size_t i = 0; i < values.size() && found.empty(); ++i) {
        if (!is_lost(values[i], all.nan_alone[i])) continue;
        found = (all.kept[i].empty() ? "" : "the optimizer's " + all.kept[i] + " of ") + optimizer.words_of(all.stepped[i]);
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

  static looked_at tensors_to_look_at(rank_optimizer const& optimizer) {
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
    optimizer.each_stepped([&](at::Tensor const& p, at::Tensor const& rounded, torch::optim::OptimizerParamState* state) {
      add(p, p, "", false);
      add(p, rounded, "", false);
      if (state == nullptr) return;
      visit_state(*state, [&](char const* name, at::Tensor& t) { add(p, t, name, true); }, [](char const*, auto&) {});
    });
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
  /// \param every number of steps from one check to the next \param optimizer of this rank; must outlive this object
  finite_of_step(record& to, topology const& where, int every, rank_optimizer const& optimizer)
      : world_(where.world()), every_(every), optimizer_(&optimizer), lost_(to.add()) {}

  void complete(record& mine, scalar_reader& numbers) override {
    bool const due = steps_ > 0 && steps_ % every_ == 0;
    ++steps_;
    if (due) finite_parameters::ask(*optimizer_, numbers, mine[lost_]);
  }
  void judge(records_of_ranks const& all, decision& found, step_report&, error_context const&) override {
    for (int r = 0; r < world_; ++r) found.parameter_lost = found.parameter_lost || all.at(r, lost_) != 0;
  }

 private:
  int world_, every_;
  rank_optimizer const* optimizer_;
  record::field lost_;
  long steps_ = 0;
};

}  // namespace chevron::detail
