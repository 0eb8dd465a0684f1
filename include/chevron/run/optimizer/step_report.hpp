#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// What a trainer tells of a step.

namespace chevron {

/// What a step says of a loss that stages give beside the model's (data/stage_loss.hpp).
struct stage_loss_value {
  std::string name;
  double value =
      0;  ///< the mean over all that microbatches count in it, over stages of this name added up; 0 where they count nothing
  double factor = 1;  ///< as declared; `value` is without it
};

/// One step, the same on every rank except for `seconds`, `samples_per_second`, `peak_in_flight`, `used_graphs` and `memory`.
struct step_report {
  long step = -1;  ///< from 0; -1: none yet
  /// Whether all ranks have been heard. false, with `trainer_options::post_validation`: loss, norm, bubble and samples are not
  /// known yet, and are not a number or 0; `trainer_options::on_report` gets them as soon as they are.
  bool settled = false;
  double loss = std::numeric_limits<double>::quiet_NaN();       ///< mean over all samples, or other weights, of all replicas
  std::vector<stage_loss_value> losses{};                       ///< of stages, in their order; `loss` does not contain them
  double grad_norm = std::numeric_limits<double>::quiet_NaN();  ///< over all parameters of the model, before clipping
  bool skipped = false;                                         ///< loss or gradient was not finite, nothing was changed
  bool clipped = false;                                         ///< gradients were scaled down to `clip_grad_norm`
  double loss_factor = 1;  ///< of loss scaling; a gradient too large for it has the step skipped, and the next factor is smaller
  /// The schedule's; without one that of the first group of the lowest trained stage's optimizer (of this rank's until settled).
  double learning_rate = 0;
  double seconds = 0;        ///< as this rank saw it
  std::int64_t samples = 0;  ///< over all replicas
  double samples_per_second = 0;
  double bubble = 0;         ///< measured: share of ranks × longest rank's time in which ranks did not compute
  int peak_in_flight = 0;    ///< chunks, on this rank
  bool used_graphs = false;  ///< this rank's computations were launched as graphs
  allocator_use memory{};    ///< of this rank's device; 0 on the CPU
};

}  // namespace chevron
