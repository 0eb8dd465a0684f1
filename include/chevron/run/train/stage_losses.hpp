#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/base/format.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/shard_agreement.hpp>
#include <chevron/run/train/step_names.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The losses of a step that stages declare beside the model's loss.

namespace chevron::detail {

/// Sums the losses of stages over the replicas into `step_report::losses`. Made only if a stage declares a loss.
class stage_losses final : public step_part {
 public:
  /// \param names names of all stages' losses; must outlive this object
  /// \param tolerance relative difference up to which two shards' losses count as equal
  stage_losses(record& to, plan_view plan, topology const& where, step_names const& names, double tolerance)
      : plan_(plan), where_(where), names_(&names), tolerance_(tolerance), numbers_(to.add(per_loss * names.most_losses(plan))) {}

  void begin(bool) override { sums_.clear(); }
  void ask(step_pass const& pass, scalar_reader& numbers) override {
    sums_.resize(pass.losses.size());
    for (std::size_t k = 0; k < pass.losses.size(); ++k) {
      tensors values;
      std::vector<double> weights;
      for (int m = 0; m < pass.batch.count(); ++m) {
        at::Tensor const& value = pass.run.stage_losses(pass.losses[k].stage, m)[pass.losses[k].index];
        if (!value.defined() || pass.batch.loss(k, m).counts == 0) continue;
        values.push_back(value);
        weights.push_back(pass.batch.loss(k, m).weight);
      }
      sums_[k].counts += pass.batch.loss_counts(k);
      sums_[k].total = pass.totals.of_losses()[k];
      numbers.ask(values, [&into = sums_[k].value, weights](std::span<double const> read) {
        for (std::size_t m = 0; m < read.size(); ++m) into += read[m] * weights[m];
      });
    }
  }
  void write(record& mine) override {
    double* next = mine.numbers(numbers_).data();
    for (sums const& one : sums_) {
      for (double const number : {one.value, one.counts, one.total}) *next++ = number;
    }
  }
  /// \throws usage_error if a loss's total in `step_total` is not the sum over replicas; preflight_error if losses of shards
  /// differ
  void judge(records_of_ranks const& all, decision& found, step_report& report, error_context const& here) override {
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks));
    std::string culprit;
    for (std::size_t s = 0; s < names_->losses.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      for (step_names::loss const& loss : names_->losses[s]) {
        std::size_t& of_rank = next[static_cast<std::size_t>(rank)];
        std::size_t const place = std::exchange(of_rank, of_rank + per_loss);
        double value = 0, counts = 0;
        for (int replica = 0; replica < where_.replicas; ++replica) {
          int const first = rank_of_stage(plan_, where_, replica, static_cast<int>(s));
          std::span<double const> const of = all.numbers(first, numbers_).subspan(place, per_loss);
          value += of[0];
          counts += of[1];
          for (int k = 1; k < where_.shards; ++k)
            check_equal_losses(k, "`" + loss.name + "`", of[0], all.numbers(first + k, numbers_)[place], tolerance_, here);
          bool const last = replica + 1 == where_.replicas;
          if (!last || std::isnan(counts) || std::isnan(of[2]) || std::abs(counts - of[2]) <= 1e-9 * of[2]) continue;
          throw usage_error("the microbatches count " + number_text(counts) + " in loss `" + loss.name + "` of stage " +
                                std::to_string(s) + ", but each was taken for a share of " + number_text(of[2]) +
                                ": give step() the total over all replicas, accumulated batches included",
                            here);
        }
        if (culprit.empty() && !std::isfinite(value)) culprit = "loss `" + loss.name + "` of stage " + std::to_string(s);
        auto const same = std::find_if(report.losses.begin(), report.losses.end(),
                                       [&](stage_loss_value const& one) { return one.name == loss.name; });
        if (same != report.losses.end()) {
          same->value += value;
        } else {
          report.losses.push_back({loss.name, value, loss.factor});
        }
      }
    }
    if (found.loss_culprit.empty()) found.loss_culprit = culprit;
  }

 private:
  static constexpr std::size_t per_loss = 3;

  /// Of a loss that a stage of this rank declares.
  struct sums {
    double value = 0;   // this replica's part of the mean, without the loss's factor
    double counts = 0;  // the sum of this replica's microbatches' weights in this loss
    double total = 0;   // the sum of weights over all replicas, the denominator of the mean
  };
  plan_view plan_;
  topology where_;
  step_names const* names_;
  double tolerance_;
  record::field numbers_;
  std::vector<sums> sums_;  // by loss of this rank's stages
};

}  // namespace chevron::detail
