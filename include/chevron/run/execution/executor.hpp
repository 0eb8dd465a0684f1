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
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/execution/bound_program.hpp>
#include <chevron/run/execution/executor_settings.hpp>
#include <chevron/run/execution/gradient_store.hpp>
#include <chevron/run/execution/speculation.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/trace/measured_bytes.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// Runs one rank's part of a program.

namespace chevron {

/// What came of a run. It belongs to the executor, and lasts until the next run.
struct run_result {
  stage_runner const& ran;        ///< its slots hold the values of stages' losses
  tensors const& losses;          ///< mean loss of each microbatch; undefined without the last stage, and where there is no loss
  std::vector<tensors>& outputs;  ///< by microbatch, the last stage's: of a program that only runs forward, without a loss
  rank_trace const& trace;        ///< what was done and when
  bool used_graphs;               ///< computations were launched as graphs

  /// The values of a stage's declared losses, of one microbatch, in the order of their declaration.
  tensors const& stage_losses(int stage, int micro_batch) const { return ran.stage_losses(stage, micro_batch); }
};

/// One rank's interpreter of a program: a loop over its operations (bound_program.hpp).
///
/// All ranks must run the same program set, with microbatches of the same count, and call `run` alike and in the same order. Each
/// drives its own transport from one thread. Stages are the caller's, and so is the optimizer: a run of a training program ends
/// before its last instruction, OPTIMIZER_STEP, which an `optimizer_turn` times and guards.
///
/// Where computations are launched as graphs (graph_runner.hpp), all else goes as it does without. Where W's are held back
/// (deferred_weights.hpp), they run when an operation that comes after them would wait, and all else keeps its order.
///
/// Failure. A transport's error passes through; whatever a stage or the loss throws becomes a `stage_error` with rank, step and
/// action, and other ranks are told of it through the transport. After any of them the step is lost and the executor refuses to
/// run again: parameters' gradients are half added up.
class executor {
 public:
  /// Collective.
  /// \param stages all stages of the model by number; those not on this rank may be empty
  /// \param gradients where B and W add; null for a program that only runs forward
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

  /// Tells the transport how many slots this program uses: once, and again after another program used it.
  /// \param more slots for what the caller sends besides; they stand behind the program's
  void open(slot_counts more = {}) {
    slot_counts const own = slots();
    comm_->open({own.activation, own.receive + more.receive, own.send + more.send}, number_);
  }
  /// Whether the transport is open for this executor's messages, or for another's.
  bool is_open() const { return comm_->is_open_for(number_); }
  slot_counts slots() const { return program_.view().slots[rank_]; }

  /// Runs the program once over these microbatches.
  /// \param reduces whether sums of gradients over the replicas start where the program says so; false: more runs add to them
  /// first
  run_result run(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(bound_.streams());
    begin(batch, step, reduces);
    return finish();
  }

  /// The beginning of such a run, on parameters that may yet be taken back: all that may run before that is known
  /// (speculation.hpp). Then comes `finish`, after `withdraw` where they were taken back; on all ranks alike.
  /// \throws usage_error where a stage changed the batch, so that nothing could be computed again
  void run_ahead(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(bound_.streams());
    begin(batch, step, reduces);
    if (!speculation_) speculation_ = speculation_of(program_, rank_);
    for (int const next : speculation_->before) carry_out(next);
    ahead_ = true;
    check_batch(batch, step);
  }

  /// Lets go of all that `run_ahead` computed, and takes what others sent meanwhile off the channels: a message is received
  /// before the next of its edge is posted, so that slots are used as the program uses them. The run starts over.
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

  /// The rest of a run.
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

  /// The caller's turn: the OPTIMIZER_STEP that ends a training program. Its time is in the trace, its memory in the peak, and
  /// errors say where they come from:
  ///
  ///     executor::optimizer_turn turn(executor);
  ///     try {
  ///       optimizer.step();
  ///       turn.ends();
  ///     } catch (...) {
  ///       turn.fails();
  ///     }
  class optimizer_turn {
   public:
    explicit optimizer_turn(executor& of) : of_(of), what_(of.at(of.program_.view().length(of.rank_) - 1)) {
      of_.broken_ = true;
      entry_ = record().add(what_);
      record().guard(what_, [&] { record().before(what_); });
    }
    void ends() {
      record().after(what_);
      record().trace().ends(entry_);
      of_.bound_.note_memory();
      of_.bound_.memory().end_step(record().step());
      of_.broken_ = false;
    }
    /// Within a `catch`: tells the other ranks, and throws on.
    [[noreturn]] void fails() { record().rethrow(what_); }

   private:
    action_record& record() { return of_.bound_.record(); }

    executor& of_;
    instruction const& what_;
    std::size_t entry_ = 0;
  };

  /// Counts in the next run what stages hold of a microbatch (activation_meter.hpp): it computes the same, more slowly. Nothing
  /// is known of computations that are launched as graphs, nor of a program that only runs forward.
  void measure_bytes() { bound_.runner().measure_bytes(); }
  /// By stage, if the last run was measured: gives it once.
  std::optional<std::vector<measured_bytes>> take_measured_bytes() {
    if (broken_) return {};
    return bound_.runner().take_measured_bytes();
  }

  program_view program() const { return program_.view(); }
  rank_trace const& last_trace() const { return bound_.record().trace(); }
  /// The same with the times of an accelerator, for which it waits.
  rank_trace const& synchronize_trace() {
    bound_.record().settle();
    return last_trace();
  }
  /// Why the last run's computations were not launched as graphs; empty where they were.
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

  /// What may have to be computed again must find the batch as it was.
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
  long number_;  // among the programs of the transport
  bound_program bound_;
  std::optional<speculation> speculation_;
  bool ahead_ = false;   // between run_ahead and finish
  bool broken_ = false;  // by a run that did not come to its end
};

}  // namespace chevron
