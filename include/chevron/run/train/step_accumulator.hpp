#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/rank_context.hpp>
#include <chevron/run/train/replica_counts.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/step_statistics.hpp>

/// \file
/// Sums one rank's numbers of a step over the step's runs.

namespace chevron::detail {

/// Sums losses, weights and times over the runs of one step: one run, or several if batches are accumulated.
class step_accumulator {
 public:
  /// \param micro_batches number of microbatches in a run; with slices, number of slices
  explicit step_accumulator(int micro_batches) : weighted_losses_(static_cast<std::size_t>(micro_batches)) {}

  /// Counts a call of `step` or `accumulate`, including a refused call.
  void count_call() { ++calls_; }

  /// Drops the runs of this step so far. Counts as a call, so that ranks which drop different runs are found.
  void drop() {
    if (passes_ == 0) return;
    ++calls_;
    passes_ = 0;
  }
  /// The number of runs of this step so far.
  int passes() const { return passes_; }

  /// Checks and stores the totals that a run was given.
  /// \param given the totals of the whole step, from the caller
  /// \param all whether this run is the last of its step; a step of one run needs no totals
  /// \throws usage_error if `given` differs from the totals of the step's earlier runs, or lacks the total of a loss with a
  /// weight of its own
  void check_total(step_total const& given, std::span<rank_loss const> losses, bool all) {
    if (passes_ > 0 && !(given == given_)) {
      throw usage_error("the batches of one step were weighed as shares of " + words_of(given_) + " and of " + words_of(given) +
                        ": give accumulate() and step() the same total");
    }
    given_ = given;
    for (rank_loss const& one : losses) {
      if ((all && passes_ == 0) || !one.weight || given.of(one.name)) continue;
      throw usage_error("loss `" + one.name +
                        "` has a weight of its own, and a step of several batches needs this loss's total "
                        "over all batches and replicas. Remedy: accumulate(batch, {total, {{\"" +
                        one.name + "\", its total}}}), and step() alike");
    }
  }
  /// Begins a run; the first run of a step clears the sums of the step before.
  void begin_pass() {
    if (passes_ == 0) {
      std::fill(weighted_losses_.begin(), weighted_losses_.end(), 0.0);
      stage_losses_.clear();
      mine_ = {};
      nanoseconds_ = 0;
      peak_in_flight_ = 0;
      used_graphs_ = true;
      memory_ = {};
    }
  }

  /// Adds a run's losses, weights and times. The host waits until an accelerator has computed the losses.
  /// \param totals total weights of the whole step, over all replicas
  /// \param losses losses that this rank's stages declare
  /// \param ran the run's executor, which has the accelerator's times
  /// \param numbers further requests, which are read together with the losses
  void add(split_batch const& batch, replica_counts const& totals, std::span<rank_loss const> losses, run_result const& run,
           executor& ran, scalar_reader numbers = {}) {
    mine_.all_counts = totals.total();
    mine_.counts += batch.counts();
    mine_.samples += batch.samples();
    mine_.shapes += batch.shapes_mark();
    tensors scalars;
    for (at::Tensor const& loss : run.losses) {
      if (loss.defined()) scalars.push_back(loss.reshape({}));  // one number, or an error
    }
    numbers.ask(scalars, [&](std::span<double const> values) {
      for (std::size_t m = 0; m < values.size(); ++m) {
        if (batch.counts_nothing(static_cast<int>(m))) continue;
        weighted_losses_[m] += values[m] * batch.weight(static_cast<int>(m));
      }
    });
    stage_losses_.resize(losses.size());
    for (std::size_t k = 0; k < losses.size(); ++k) {
      tensors values;
      std::vector<double> weights;
      for (int m = 0; m < batch.count(); ++m) {
        at::Tensor const& value = run.stage_losses(losses[k].stage, m)[losses[k].index];
        if (!value.defined() || batch.loss(k, m).counts == 0) continue;
        values.push_back(value);
        weights.push_back(batch.loss(k, m).weight);
      }
      stage_losses_[k].counts += batch.loss_counts(k);
      stage_losses_[k].total = totals.of_losses()[k];
      numbers.ask(values, [&into = stage_losses_[k].value, weights](std::span<double const> read) {
        for (std::size_t m = 0; m < read.size(); ++m) into += read[m] * weights[m];
      });
    }
    numbers.start();
    // The host reads the times of earlier computations while the accelerator runs the last ones, and the norms.
    rank_trace const& trace = ran.synchronize_trace();
    numbers.read();
    mine_.busy_seconds += trace.busy_seconds();
    mine_.span_seconds += trace.span_seconds();
  }
  /// Ends a run. \param nanoseconds duration of the call of `step` or `accumulate`
  void end_pass(rank_trace const& trace, bool used_graphs, std::int64_t nanoseconds) {
    peak_in_flight_ = std::max(peak_in_flight_, trace.peak_in_flight());
    used_graphs_ = used_graphs_ && used_graphs;
    memory_.add(trace.memory());
    nanoseconds_ += nanoseconds;
    ++passes_;
  }
  /// Ends the step, and writes this rank's own figures into the report.
  void end_step(step_report& report) {
    report.seconds = static_cast<double>(nanoseconds_) * 1e-9;
    report.peak_in_flight = peak_in_flight_;
    report.used_graphs = used_graphs_;
    report.memory = memory_;
    passes_ = 0;
  }

  /// Warns, at the end of a training, of batches that were accumulated and never stepped. Does nothing while an exception ends
  /// the training, since the exception tells more.
  /// \param step number of the step that did not come
  void warn_of_lost(long step) const noexcept {
    if (passes_ == 0 || std::uncaught_exceptions() > exceptions_) return;
    try {
      TORCH_WARN("the trainer ends with ", passes_, passes_ == 1 ? " accumulated batch" : " accumulated batches", " that step ",
                 step, " never took: no parameter learns from them. Remedy: accumulate() for all but the last batch of a step, "
                       "step() for the last, also at the end of the data");
    } catch (...) {  // by a handler of warnings
    }
  }

  /// This rank's numbers for the gather that ends the step.
  /// \param data fingerprints of the step's batches
  step_contribution contribution(std::span<double const> data) const {
    step_contribution out = mine_;
    out.calls = calls_;
    out.weighted_losses = weighted_losses_;
    out.stage_losses = stage_losses_;
    out.data = data;
    return out;
  }

 private:
  static std::string words_of(step_total const& total) {
    std::string out = number_text(total.model);
    for (auto const& [name, counts] : total.losses) out += ", " + number_text(counts) + " in loss `" + name + "`";
    return out;
  }

  int const exceptions_ = std::uncaught_exceptions();  // where this object was made
  int passes_ = 0;
  std::int64_t calls_ = 0;
  step_total given_;
  std::vector<double> weighted_losses_;          // by microbatch
  std::vector<loss_contribution> stage_losses_;  // of this rank's stages
  step_contribution mine_;
  std::int64_t nanoseconds_ = 0;
  int peak_in_flight_ = 0;
  bool used_graphs_ = true;
  allocator_use memory_;
};

}  // namespace chevron::detail
