#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <chevron/checkpoint/frozen_base.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/trainer.hpp>

#include "common/console.hpp"
#include "common/job_options.hpp"

/// \file
/// What a run tells of its steps, and where it goes on.

namespace chevron::train {

/// Whether a checkpoint at the end of the last step can be gone on from, for what comes after training.
enum class nothing_left { is_an_error, may_be };

/// Goes on from the last checkpoint in the folder that the options name, if --resume is given, and checks that checkpoints can be
/// saved there. Collective.
/// \param words what must be the same for a resumed run to be the run that was interrupted
/// \returns words for the first step, and for flags that differ from those of the saved run; nullopt without a checkpoint, as at
/// the first start of a job that launchers start again after failures
std::optional<std::string> begin_from_checkpoint(job_options const& o, std::map<std::string, std::string> const& words,
                                                 trainer& train, nothing_left left = nothing_left::is_an_error);

/// Saves, after a step for which that is due. Collective. \param step steps that are done
void save_where_due(job_options const& o, std::map<std::string, std::string> const& words, trainer& train, long step,
                    save_options const& how = {});

/// Says each step on the terminal, in the metrics file and in the event file of TensorBoard, on rank 0, once its report is there:
/// with post-validation after the next step has begun.
class step_teller {
 public:
  /// \param flops_per_token of the model, for training
  step_teller(job_options const& o, topology const& here, double flops_per_token);

  /// \param first_step number of the first step to be told; steps that people read count from 1
  void open(long first_step);
  void close();
  /// Before other text is printed between two steps.
  void make_room();

  /// How long a step's data took to load.
  void loaded(long step, double seconds) { loading_[step] = seconds; }
  void tell(step_report const& report);

  /// Before a step behind which the model is evaluated: the step's figures are written with the loss of `validated`.
  void will_validate(long step);
  /// \param loss mean on validation data behind the step of `will_validate`
  void validated(double loss);

  double first_loss() const { return first_loss_; }
  double last_loss() const { return last_loss_; }
  /// Steps whose computations were launched as graphs.
  long launched() const { return launched_; }

 private:
  void write(long step, named_figures const& figures);
  void write_validated(named_figures figures);

  job_options const& options_;
  topology here_;
  double tokens_, flops_per_token_;  // tokens_: of all ranks in a step
  long first_step_ = 0, launched_ = 0;
  double first_loss_ = 0, last_loss_ = 0;
  std::map<long, double> loading_;
  long validated_after_ = -1;             // step whose figures are written with a loss on validation data
  std::optional<double> validation_;      // that loss, once it is known
  std::optional<named_figures> waiting_;  // that step's figures, until then
  std::unique_ptr<step_lines> lines_;     // null on other ranks than 0
  std::unique_ptr<metrics_file> metrics_;
  std::unique_ptr<event_file> events_;  // null without --tensorboard, too
};

}  // namespace chevron::train
