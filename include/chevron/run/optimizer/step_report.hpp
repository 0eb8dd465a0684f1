#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// A trainer's report of a step.

namespace chevron {

/// The figure of a loss that stages give beside the model's (data/stage_loss.hpp).
struct stage_loss_value {
  std::string name;
  /// The mean over all that microbatches count in this loss, added up over the stages that declare the name, without the factor;
  /// 0 where microbatches count nothing.
  double value = 0;
  double factor = 1;  ///< as declared
};

/// The figures of one step, the same on every rank except for `seconds`, `samples_per_second`, `peak_in_flight`, `used_graphs`
/// and `memory`.
struct step_report {
  long step = -1;  ///< from 0; -1: no step yet
  /// Whether the numbers of all ranks are in the report. false, with `trainer_options::post_validation`: loss and norm are not a
  /// number yet, bubble and samples 0; `trainer_options::on_report` gets the report once all its numbers are known.
  bool settled = false;
  double loss = std::numeric_limits<double>::quiet_NaN();       ///< mean over all samples, or by weights, of all replicas
  std::vector<stage_loss_value> losses{};                       ///< of stages, in their order; `loss` does not contain them
  double grad_norm = std::numeric_limits<double>::quiet_NaN();  ///< over all parameters of the model, before clipping
  bool skipped = false;                                         ///< loss or gradient was not finite; no parameter was changed
  bool clipped = false;                                         ///< gradients were scaled down to `clip_grad_norm`
  double loss_factor = 1;  ///< of loss scaling; a gradient that overflows under it has the step skipped and the factor lowered
  /// The rate of `trainer_options::learning_rate`; without that function, of the first group of the lowest trained stage's
  /// optimizer (of this rank's until settled).
  double learning_rate = 0;
  double seconds = 0;             ///< time of the step on this rank's clock
  std::int64_t samples = 0;       ///< over all replicas
  double samples_per_second = 0;  ///< `samples` / `seconds`
  double bubble = 0;              ///< measured: share of ranks × longest rank's time in which ranks did not compute
  int peak_in_flight = 0;         ///< chunks, on this rank
  bool used_graphs = false;       ///< this rank's computations were launched as graphs
  allocator_use memory{};         ///< of this rank's device; 0 on the CPU
};

}  // namespace chevron
