#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/shard_agreement.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The model's loss of a step.

namespace chevron::detail {

/// Sums all microbatches' losses into the report, by replica and microbatch: sums have equal bits on all ranks, for any cut into
/// stages.
class model_losses final : public step_part {
 public:
  /// \param tolerance relative difference up to which two shards' losses count as equal
  model_losses(record& to, plan_view plan, topology const& where, double tolerance)
      : plan_(plan),
        where_(where),
        tolerance_(tolerance),
        weighted_(static_cast<std::size_t>(plan.size.units())),
        losses_(to.add(weighted_.size())) {}

  /// This rank's part of the mean, by microbatch; zeros on ranks without the last stage.
  record::field const& by_micro_batch() const { return losses_; }

  void begin(bool) override { std::fill(weighted_.begin(), weighted_.end(), 0.0); }
  void ask(step_pass const& pass, scalar_reader& numbers) override {
    tensors scalars;
    for (at::Tensor const& loss : pass.run.losses) {
      if (loss.defined()) scalars.push_back(loss.dim() == 0 ? loss : loss.reshape({}));  // one number, or an error
    }
    numbers.ask(scalars, [this, &batch = pass.batch](std::span<double const> values) {
      for (std::size_t m = 0; m < values.size(); ++m) {
        if (batch.counts_nothing(static_cast<int>(m))) continue;
        weighted_[m] += values[m] * batch.weight(static_cast<int>(m));
      }
    });
  }
  void write(record& mine) override { mine.write(losses_, weighted_); }
  /// \throws preflight_error if the shards of the last stage have different losses for a microbatch
  void judge(records_of_ranks const& all, decision& found, step_report& report, error_context const& here) override {
    int finite = 0;
    std::string culprit;
    report.loss = 0;
    for (int replica = 0; replica < where_.replicas; ++replica) {
      int const first = rank_of_stage(plan_, where_, replica, plan_.stages - 1);
      for (std::size_t m = 0; m < losses_.count; ++m) {
        double const loss = all.numbers(first, losses_)[m];
        for (int k = 1; k < where_.shards; ++k)
          check_equal_losses(k, "microbatch " + std::to_string(m), loss, all.numbers(first + k, losses_)[m], tolerance_, here);
        finite += std::isfinite(loss) ? 1 : 0;
        if (culprit.empty() && !std::isfinite(loss)) {
          culprit = "the loss of microbatch " + std::to_string(m);
          if (where_.replicas > 1) culprit += " of replica " + std::to_string(replica);
        }
        report.loss += loss;
      }
    }
    if (!culprit.empty() && finite > 0) culprit += ", unlike " + std::to_string(finite) + (finite > 1 ? " others," : " other,");
    if (found.loss_culprit.empty()) found.loss_culprit = culprit;
  }

 private:
  plan_view plan_;
  topology where_;
  double tolerance_;
  std::vector<double> weighted_;  // by microbatch
  record::field losses_;
};

}  // namespace chevron::detail
