#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/execute/bound_program.hpp>
#include <chevron/run/execute/executor_settings.hpp>
#include <chevron/run/execute/gradient_store.hpp>
#include <chevron/run/execute/speculation.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Runs one rank's part of a program.

namespace chevron::detail {

/// The results of a run. References are to members of the executor, valid until the executor's next run.
struct run_result {
  stage_runner const& ran;        ///< has the values of stages' losses
  tensors const& losses;          ///< mean loss of each microbatch; undefined without the last stage or without a loss function
  std::vector<tensors>& outputs;  ///< the last stage's outputs by microbatch, if the program only runs forward, without a loss
  rank_trace const& trace;        ///< the rank's actions and their times
  bool used_graphs;               ///< computations were launched as graphs

  /// The values of a stage's declared losses, of one microbatch, in the order of their declaration.
  tensors const& stage_losses(int stage, int micro_batch) const { return ran.stage_losses(stage, micro_batch); }
};

/// Interprets one rank's part of a program, in a loop over operations (bound_program.hpp).
///
/// All ranks must run the same program, with the same number of microbatches, and make the same calls in the same order. Each
/// rank calls its own transport, from one thread. The caller owns stages and optimizer: a run of a training program ends before
/// the last instruction, OPTIMIZER_STEP, which the caller executes within an `optimizer_turn`.
///
/// Failure: `run` throws a transport's error unchanged; an exception of a stage or the loss becomes a `stage_error` with rank,
/// step and action, which the transport reports to all ranks. Both errors end the step, and the executor refuses to run again,
/// since gradients may be incomplete.
class executor {
 public:
  /// Binds the program to the stages, and connects its edges. Collective.
  /// \param comm the rank's transport; `comm`, `stages` and `gradients` must outlive this object
  /// \param stages all stages of the model by number; stages of other ranks may be empty
  /// \param loss the model's loss, on the rank of the last stage; if empty, a program that only runs forward returns outputs
  /// \param gradients the gradients to which B and W add; null for a program that only runs forward
  executor(proved_program program, transport& comm, std::vector<stage>& stages, loss_function loss, executor_settings settings,
           gradient_store* gradients = nullptr)
      : program_(std::move(program)),
        comm_(&comm),
        rank_(comm.topology().pipeline_rank()),
        number_(comm.new_program()),
        bound_(program_.view(), comm, stages, std::move(loss), std::move(settings), gradients) {
    comm.connect(edges_of(program_));
  }
  executor(executor const&) = delete;
  executor& operator=(executor const&) = delete;

  /// Opens the transport for this program's slots. Call before the first run, and after another program used the transport.
  /// \param more slots for the caller's own messages, numbered after the program's slots
  void open(slot_counts more = {}) {
    slot_counts const own = slots();
    comm_->open({own.activation, own.receive + more.receive, own.send + more.send}, number_);
  }
  /// Whether the transport is open for this executor's messages.
  bool is_open() const { return comm_->is_open_for(number_); }
  /// The slots of this rank's program.
  slot_counts slots() const { return program_.view().slots[rank_]; }

  /// Runs the program once over the microbatches of a batch. Collective.
  /// \param step the step's number, which selects random numbers
  /// \param reduces whether the program's REDUCE_GRADs start the sums of gradients over the replicas; false: further runs add
  /// to the gradients first
  run_result run(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(bound_.streams());
    begin(batch, step, reduces);
    return finish();
  }

  /// Runs the beginning of a run (speculation.hpp) before the verdict of post-validation, which may restore parameters. After a
  /// good verdict, call `finish`; after a bad verdict, call `withdraw` and then `finish`, on all ranks. Arguments as for `run`.
  /// \throws usage_error if a stage changed the batch in place, since the beginning could not be computed again
  void run_ahead(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(bound_.streams());
    begin(batch, step, reduces);
    if (!speculation_) speculation_ = speculation_of(program_, rank_);
    for (int const next : speculation_->before) carry_out(next);
    ahead_ = true;
    check_batch(batch, step);
  }

  /// Drops all results of `run_ahead`, and receives the messages that ranks sent in `run_ahead`, so that `finish` starts the
  /// run over. On each edge, receives a message before posting the next receive, since slots are used in the program's order.
  void withdraw() {
    compute_streams::scope const here(bound_.streams());
    for (int const position : speculation_->unread) {
      instruction const& i = at(position);
      if (position >= speculation_->end) comm_->post_receive(i.peer, i.op, i.source);
      comm_->receive(i.source);
    }
    for (int const position : speculation_->sending) comm_->wait_send(at(position).source);
    bound_.start_over();
    ahead_ = false;
  }

  /// Runs the rest of a run. \returns the results of the whole run
  run_result finish() {
    compute_streams::scope const here(bound_.streams());
    int next = 0;
    if (std::exchange(ahead_, false)) {
      for (int const postponed : speculation_->postponed) carry_out(postponed);
      next = speculation_->end;
    }
    for (int const end = static_cast<int>(bound_.size()); next < end; ++next) carry_out(next);
    bound_.finish();
    broken_ = false;
    stage_runner& ran = bound_.runner();
    return {ran, ran.losses(), ran.outputs(), last_trace(), ran.launches()};
  }

  /// Surrounds the OPTIMIZER_STEP that ends a training program and that the caller executes: adds the step's time to the trace,
  /// its memory to the peak, and rank, step and action to its errors.
  class optimizer_turn {
   public:
    /// Begins the turn, after a run. \param of must outlive this object
    explicit optimizer_turn(executor& of) : of_(of), what_(of.at(of.program_.view().length(of.rank_) - 1)) {
      of_.broken_ = true;
      entry_ = record().add(what_);
      record().guard(what_, [&] { record().before(what_); });
    }
    /// Ends the turn after a step that succeeded: the executor may run again.
    void ends() {
      record().after(what_);
      record().trace().ends(entry_);
      of_.bound_.note_memory();
      of_.bound_.memory().end_step(record().step());
      of_.broken_ = false;
    }
    /// Called in a `catch`: adds rank, step and action to the exception, reports it to all ranks, and rethrows it.
    [[noreturn]] void fails() { record().rethrow(what_); }

   private:
    action_record& record() { return of_.bound_.record(); }

    executor& of_;
    instruction const& what_;
    std::size_t entry_ = 0;
  };

  /// In the next run, measures the bytes that stages store for a microbatch (activation_meter.hpp). Results are unchanged, but
  /// the run is slower. Computations launched as graphs are not measured, nor are programs that only run forward.
  void measure_bytes() { bound_.runner().measure_bytes(); }
  /// The measured bytes by stage, returned once after a measured run; empty otherwise.
  std::optional<std::vector<measured_bytes>> take_measured_bytes() {
    if (broken_) return {};
    return bound_.runner().take_measured_bytes();
  }

  program_view program() const { return program_.view(); }                  ///< the program that this executor runs
  rank_trace const& last_trace() const { return bound_.record().trace(); }  ///< the last run's actions and their times
  /// Waits for the accelerator, and returns the trace with the accelerator's times.
  rank_trace const& synchronize_trace() {
    bound_.record().settle();
    return last_trace();
  }
  /// The reason why the last run's computations were not launched as graphs, in words; empty where they were.
  std::string graph_fallback_reason() const { return bound_.runner().why_not(); }

 private:
  void begin(split_batch const& batch, long step, bool reduces) {
    if (broken_) {
      throw usage_error("an earlier step failed on this rank: nothing can be run after it",
                        {comm_->topology().global_rank, -1, step, to_text(action{}).str()});
    }
    broken_ = true;
    ahead_ = false;
    bound_.begin(batch, step, reduces);
  }
  void carry_out(int number) { bound_.carry_out(static_cast<std::size_t>(number)); }
  instruction const& at(int position) const { return program_.view().at(rank_, position); }

  /// Refuses a batch that a stage changed in place, since the beginning of the run may have to be computed again.
  void check_batch(split_batch const& batch, long step) const {
    for (int m = 0; m < batch.count(); ++m) {
      if (!batch.was_changed(m)) continue;
      throw usage_error("a stage changes microbatch " + std::to_string(m) +
                            " in place, and so the step cannot be done over: clone it first, or do without post_validation",
                        {comm_->topology().global_rank, -1, step, ""});
    }
  }

  proved_program program_;
  transport* comm_;
  int rank_;
  long number_;  // identifies this executor among the users of the transport
  bound_program bound_;
  std::optional<speculation> speculation_;
  bool ahead_ = false;   // between run_ahead and finish
  bool broken_ = false;  // a run or optimizer turn has not ended
};

}  // namespace chevron::detail
