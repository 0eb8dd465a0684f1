#pragma once

#include <span>
#include <string>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/replica_counts.hpp>
#include <chevron/run/train/step_report.hpp>

/// \file
/// The interface of a part of a step: a figure of the report, a check over ranks, or state that a step changes.

namespace chevron::detail {

/// One run of the program within a step. A step with accumulated batches has several.
struct step_pass {
  split_batch const& batch;           ///< this replica's batch
  replica_counts const& totals;       ///< sums of weights of the whole step over all replicas
  std::span<rank_loss const> losses;  ///< losses that this rank's stages declare
  run_result const& run;              ///< losses of the run
};

/// Ranks whose copies of a parameter differ.
struct unequal_ranks {
  std::string words;  ///< `ranks 0 and 2 held different copies of a parameter`; empty: all copies are equal
  std::vector<int> ranks{};
};

/// Findings of parts about a step, equal on all ranks, from which `step_end` decides to apply, skip or refuse the step.
struct decision {
  std::string loss_culprit;      ///< words for the first loss that is not finite; empty: all are finite
  std::string gradient_culprit;  ///< words for a gradient that is not finite; empty: all are finite
  bool parameter_lost = false;   ///< a rank found a parameter that is not finite
  unequal_ranks copies = {};     ///< ranks whose copies of a parameter differ
};

/// A part of a step. Functions from `begin` on are called in this order, of all parts in the order in which `step_parts::make`
/// made them: in `trainer`, and in `step_end::make_parts`. The optimizer steps between `judge` and `finish`. The constructor
/// adds the part's fields to the record. A part that was not asked for is not made; a part with fields is made on all ranks or
/// on none.
class step_part {
 public:
  step_part() = default;
  step_part(step_part const&) = delete;
  step_part& operator=(step_part const&) = delete;
  virtual ~step_part() = default;

  /// Runs the part's collectives once, for a transport that connects ranks at the first use. Collective.
  virtual void connect([[maybe_unused]] transport& comm) {}
  /// Begins a step, before its first forward. \param pending whether the verdict on the step before is still to come
  virtual void begin([[maybe_unused]] bool pending) {}
  /// Takes the batch of a run, before the run's first forward. Collective. \param step the step's number
  virtual void take([[maybe_unused]] transport& comm, [[maybe_unused]] split_batch const& batch, [[maybe_unused]] long step) {}
  /// Begins the step's forwards again, since the step before was undone. \param skipped whether the step before is skipped
  virtual void begin_again([[maybe_unused]] bool skipped) {}
  /// Starts collectives that need the step's last forward, and no gradient. Collective.
  virtual void start([[maybe_unused]] transport& comm) {}
  /// Sums or compares gradients over ranks of a pipeline or a stage, after the sums over replicas. Collective.
  /// \param program counts of slots that the program uses
  virtual void sum([[maybe_unused]] transport& comm, [[maybe_unused]] slot_counts program,
                   [[maybe_unused]] error_context const& here) {}
  /// Writes numbers of the complete gradients and of parameters before the optimizer's step, or requests them from an
  /// accelerator. \param numbers receives requests, which may write to `mine` when they are read
  virtual void complete([[maybe_unused]] record& mine, [[maybe_unused]] scalar_reader& numbers) {}
  /// Requests numbers of a run from an accelerator. \param numbers receives requests, which are read before `add`
  virtual void ask([[maybe_unused]] step_pass const& pass, [[maybe_unused]] scalar_reader& numbers) {}
  /// Adds the numbers of a run to those of the step. \param trace the run's times, also those of an accelerator
  virtual void add([[maybe_unused]] step_pass const& pass, [[maybe_unused]] rank_trace const& trace) {}
  /// Writes this rank's numbers of the step, and stores what `judge` needs beside the gathered numbers: with post-validation
  /// the next step's `begin` precedes this step's `judge`.
  virtual void write([[maybe_unused]] record& mine) {}
  /// Compares the ranks' numbers, and writes figures to the report. Called with equal numbers on all ranks, so errors are equal.
  virtual void judge([[maybe_unused]] records_of_ranks const& all, [[maybe_unused]] decision& found,
                     [[maybe_unused]] step_report& report, [[maybe_unused]] error_context const& here) {}
  /// Ends the collectives that `start` started, after the optimizer's step. Collective.
  virtual void finish([[maybe_unused]] transport& comm) {}
  /// Restores what the step changed before its decision, since the step is skipped: right after `finish` or, with
  /// post-validation, after the verdict.
  virtual void skip() {}
  /// Drops the runs of the step so far, which no optimizer step will follow.
  virtual void drop() {}
};

/// The global rank that has a stage in a replica, for the first shard.
inline int rank_of_stage(plan_view const& plan, topology const& where, int replica, int stage) {
  return where.rank_at(replica, plan.rank_of_stage(stage), 0);
}

}  // namespace chevron::detail
