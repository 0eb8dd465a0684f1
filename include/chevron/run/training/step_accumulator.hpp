#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/number_text.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/scalar_reader.hpp>
#include <chevron/run/execution/executor.hpp>
#include <chevron/run/optimizer/step_report.hpp>
#include <chevron/run/optimizer/step_statistics.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// What one rank has to say of a step.

namespace chevron::detail {

/// Adds up the runs of one step: one, or several where batches are accumulated.
class step_accumulator {
 public:
  explicit step_accumulator(int micro_batches) : weighted_losses_(static_cast<std::size_t>(micro_batches)) {}

  /// The trainer was called, whether or not it takes what it was given.
  void count_call() { ++calls_; }

  /// Runs of this step so far.
  int passes() const { return passes_; }

  /// Before a run.
  /// \param global_weight what the caller says that the whole step counts, as it was given
  /// \throws usage_error where it is not what the runs before were given
  void check_weight(double global_weight) const {
    if (passes_ == 0 || global_weight == mine_.all_counts) return;
    throw usage_error("the batches of one step were weighed as shares of " + number_text(mine_.all_counts) + " and of " +
                      number_text(global_weight) + ": give accumulate() and step() the same total");
  }
  /// A run begins: of a new step, the first one forgets the step before.
  void begin_pass() {
    if (passes_ == 0) {
      std::fill(weighted_losses_.begin(), weighted_losses_.end(), 0.0);
      mine_ = {};
      nanoseconds_ = 0;
      peak_in_flight_ = 0;
      used_graphs_ = true;
      memory_ = {};
    }
  }

  /// What a run computed. The host waits for an accelerator, once.
  /// \param global_weight what the whole step counts over all replicas
  /// \param ran the run's executor, which has the accelerator's times
  /// \param numbers asked for already: they are read with the losses
  void add(split_batch const& batch, double global_weight, tensors const& losses, executor& ran, scalar_reader numbers = {}) {
    mine_.all_counts = global_weight;
    mine_.counts += batch.counts();
    mine_.samples += batch.samples();
    mine_.shapes += batch.shapes_mark();
    tensors scalars;
    for (at::Tensor const& loss : losses) {
      if (loss.defined()) scalars.push_back(loss.reshape({}));  // one number, or an error
    }
    numbers.ask(scalars, [&](std::span<double const> values) {
      for (std::size_t m = 0; m < values.size(); ++m) {
        if (batch.counts_nothing(static_cast<int>(m))) continue;
        weighted_losses_[m] += values[m] * batch.weight(static_cast<int>(m));
      }
    });
    numbers.read();
    rank_trace const& trace = ran.synchronize_trace();  // all that it waits for is over
    mine_.busy_seconds += trace.busy_seconds();
    mine_.span_seconds += trace.span_seconds();
  }
  /// A run has ended.
  void end_pass(rank_trace const& trace, bool used_graphs, std::int64_t nanoseconds) {
    peak_in_flight_ = std::max(peak_in_flight_, trace.peak_in_flight());
    used_graphs_ = used_graphs_ && used_graphs;
    memory_.add(trace.memory());
    nanoseconds_ += nanoseconds;
    ++passes_;
  }
  /// The step has ended: fills in what its report says of this rank alone.
  void end_step(step_report& report) {
    report.seconds = static_cast<double>(nanoseconds_) * 1e-9;
    report.peak_in_flight = peak_in_flight_;
    report.used_graphs = used_graphs_;
    report.memory = memory_;
    passes_ = 0;
  }

  /// For the other ranks.
  /// \param data fingerprints of the step's batches
  step_contribution contribution(std::span<double const> data) const {
    step_contribution out = mine_;
    out.calls = calls_;
    out.weighted_losses = weighted_losses_;
    out.data = data;
    return out;
  }

 private:
  int passes_ = 0;
  std::int64_t calls_ = 0;
  std::vector<double> weighted_losses_;  // by microbatch
  step_contribution mine_;
  std::int64_t nanoseconds_ = 0;
  int peak_in_flight_ = 0;
  bool used_graphs_ = true;
  allocator_use memory_;
};

}  // namespace chevron::detail
