#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <chevron/run/core/rank_trace.hpp>

/// \file
/// A trainer's report of a step.

namespace chevron {

/// The value of a loss that stages compute in addition to the model's loss (data/stage_loss.hpp).
struct stage_loss_value {
  std::string name;
  /// The mean over all microbatches, weighted by their counts in this loss, summed over the stages that declare the name;
  /// without the factor. 0 if all counts are 0.
  double value = 0;
  double factor = 1;  ///< as the stage declares
};

/// The figures of one step, the same on every rank except for `seconds`, `samples_per_second`, `peak_in_flight`, `used_graphs`
/// and `memory`.
struct step_report {
  long step = -1;  ///< from 0; -1: no step yet
  /// Whether the report contains the numbers of all ranks. false, only with `trainer_options::post_validation`: loss and norm
  /// are NaN, bubble and samples 0; `trainer_options::on_report` receives the report once all its numbers are known.
  bool settled = false;
  double loss = std::numeric_limits<double>::quiet_NaN();       ///< mean over all replicas' samples, or weighted mean
  std::vector<stage_loss_value> losses{};                       ///< losses of stages, by stage; not contained in `loss`
  double grad_norm = std::numeric_limits<double>::quiet_NaN();  ///< over all parameters of the model, before clipping
  bool skipped = false;                                         ///< loss or gradient was not finite; no parameter was changed
  bool clipped = false;                                         ///< gradients were scaled down to `clip_grad_norm`
  double loss_factor = 1;  ///< factor of loss scaling; if a gradient overflows, the step is skipped and the factor shrinks
  /// The result of `trainer_options::learning_rate`; without this function, the rate of the optimizer's first group on the rank
  /// of the first trained stage (on this rank until the report is settled).
  double learning_rate = 0;
  double seconds = 0;             ///< time of the step on this rank's clock
  std::int64_t samples = 0;       ///< over all replicas
  double samples_per_second = 0;  ///< `samples` / `seconds`
  double bubble = 0;              ///< measured share of ranks × longest rank's time in which ranks did not compute
  int peak_in_flight = 0;         ///< largest number of chunks in flight on this rank
  bool used_graphs = false;       ///< this rank's computations were launched as graphs
  allocator_use memory{};         ///< of this rank's device; 0 on the CPU
};

}  // namespace chevron
