#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/core/profiler_range.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/execute/action_record.hpp>
#include <chevron/run/execute/executor_settings.hpp>
#include <chevron/run/execute/gradient_store.hpp>
#include <chevron/run/execute/graph_runner.hpp>
#include <chevron/run/execute/memory_meter.hpp>
#include <chevron/run/execute/operation.hpp>
#include <chevron/run/execute/speculation.hpp>
#include <chevron/run/execute/stage_runner.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Binds one rank's part of a program to stages and a transport, once, and runs it. The way of an F: `executor::computation`,
/// `stage_runner::run`, `stage_execution::forward`, `stage::forward_parts`, `detail::call` (stage_parts.hpp), the module.

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

/// Interprets one rank's part of a program, in a loop over operations: a run is `begin`, then `finish`. The constructor chooses
/// each operation's methods and slots, and makes the meters and stores that the options and the plan ask for.
///
/// All ranks must run the same program, with the same number of microbatches, and make the same calls in the same order. Each
/// rank calls its own transport, from one thread. The caller owns stages and optimizer: a run of a training program ends before
/// the last instruction, OPTIMIZER_STEP, which the caller executes within an `optimizer_turn`.
///
/// The stage runner owns the tensors of unfinished microbatches, received tensors included. The transport owns a sent tensor
/// from `post_send` to `wait_send`. During a run, no other object drives the transport: messages for a fused pair are received
/// before both halves run, and sent after both.
///
/// Failure: a run throws a transport's error unchanged; an exception of a stage or the loss becomes a `stage_error` with rank,
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
        gradients_(gradients),
        before_backward_(settings.before_backward),
        unshard_(settings.unshard),
        streams_(settings.streams ? settings.streams : std::make_shared<compute_streams>(at::kCPU, false)),
        record_(comm, program_, streams_->where()),
        runner_(program_, comm.topology(), stages, std::move(loss), settings, streams_) {
    if (settings.graphs || !streams_->where().is_cpu()) memory_.emplace(program_, rank_, streams_->where());
    if (settings.graphs) {
      graphs_.emplace(std::move(settings.graphs), program_, rank_, runner_, memory_->stats(), gradients, comm.is_zero_copy());
    }
    bind_all();
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
  slot_counts slots() const { return program().slots[rank_]; }

  /// Begins a run over the microbatches of a batch, which must outlive the run.
  /// \param step the step's number, which selects random numbers
  /// \param reduces whether the program's REDUCE_GRADs start the sums of gradients over the replicas; false: further runs add
  /// to the gradients first
  /// \throws usage_error if an earlier run failed
  void begin(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(*streams_);
    if (broken_) {
      throw usage_error("an earlier step failed on this rank, and no later one can run. Remedy: a new trainer, from a checkpoint",
                        {comm_->topology().global_rank, -1, step, to_text(action{}).str()});
    }
    broken_ = true;
    ahead_ = false;
    frame_ = {&batch, step};
    reduces_ = reduces;
    record_.begin_step(step);
    if (memory_) memory_->begin_step();
    comm_->slices(record_.slices());
    comm_->begin_step(step);
    if (graphs_) graphs_->begin(operations_, batch, record_);
  }

  /// Runs the beginning of the program (speculation.hpp) before the verdict of post-validation, which may restore parameters.
  /// After a good verdict, call `finish`; after a bad verdict, call `withdraw` and then `finish`, on all ranks.
  /// \throws usage_error if a stage changed the batch in place, since the beginning could not be computed again
  void run_ahead() {
    compute_streams::scope const here(*streams_);
    if (!speculation_) speculation_ = speculation_of(program_, rank_);
    for (int const next : speculation_->before) execute(next);
    ahead_ = true;
    check_batch();
  }

  /// Drops all results of `run_ahead`, and receives the messages that ranks sent in `run_ahead`, so that `finish` starts the
  /// run over. On each edge, receives a message before posting the next receive, since slots are used in the program's order.
  void withdraw() {
    compute_streams::scope const here(*streams_);
    for (int const position : speculation_->unread) {
      instruction const& i = at(position);
      if (position >= speculation_->end) comm_->post_receive(i.peer, i.op, i.source);
      comm_->receive(i.source);
    }
    for (int const position : speculation_->sending) comm_->wait_send(at(position).source);
    runner_.drop();
    record_.start_over();
    ahead_ = false;
  }

  /// Runs the program, or what `run_ahead` has left of it; records the peak of memory, and compares the first run's slices.
  /// Collective. \returns the results of the whole run
  run_result finish() {
    compute_streams::scope const here(*streams_);
    int next = 0;
    if (std::exchange(ahead_, false)) {
      for (int const postponed : speculation_->postponed) execute(postponed);
      next = speculation_->end;
    }
    for (int const end = static_cast<int>(operations_.size()); next < end; ++next) execute(next);
    if (memory_) note_memory();
    runner_.compare_slices(*comm_, frame_);
    broken_ = false;
    return {runner_, runner_.losses(), runner_.outputs(), last_trace(), launches()};
  }

  /// Surrounds the OPTIMIZER_STEP that ends a training program and that the caller executes: adds the step's time to the trace,
  /// its memory to the peak, and rank, step and action to its errors.
  class optimizer_turn {
   public:
    /// Begins the turn, after a run. \param of must outlive this object
    explicit optimizer_turn(executor& of) : of_(of), what_(of.at(of.program().length(of.rank_) - 1)) {
      of_.broken_ = true;
      entry_ = of_.record_.add(what_);
      of_.record_.guard(what_, [&] { of_.record_.before(what_); });
    }
    /// Ends the turn after a step that succeeded: the executor may run again.
    void ends() {
      of_.record_.after(what_);
      of_.record_.trace().ends(entry_);
      if (of_.memory_) {
        of_.note_memory();
        of_.memory_->end_step(of_.record_.step());
      }
      of_.broken_ = false;
    }
    /// Called in a `catch`: adds rank, step and action to the exception, reports it to all ranks, and rethrows it.
    [[noreturn]] void fails() { of_.record_.rethrow(what_); }

   private:
    executor& of_;
    instruction const& what_;
    std::size_t entry_ = 0;
  };

  /// In the next run, measures the bytes that stages store for a microbatch (activation_meter.hpp). Results are unchanged, but
  /// the run is slower. Computations launched as graphs are not measured, nor are programs that only run forward.
  void measure_bytes() { runner_.measure_bytes(); }
  /// The measured bytes by stage, returned once after a measured run; empty otherwise.
  std::optional<std::vector<measured_bytes>> take_measured_bytes() {
    if (broken_) return {};
    return runner_.take_measured_bytes();
  }

  program_view program() const { return program_.view(); }          ///< the program that this executor runs
  rank_trace const& last_trace() const { return record_.trace(); }  ///< the last run's actions and their times
  /// Waits for the accelerator, and returns the trace with the accelerator's times.
  rank_trace const& synchronize_trace() {
    record_.settle();
    return last_trace();
  }
  /// The reason why the last run's computations were not launched as graphs, in words; empty where they were.
  std::string graph_fallback_reason() const { return graphs_ ? graphs_->why_not() : "no graphs were asked for"; }

 private:
  // Binds operations.

  /// Binds all instructions but OPTIMIZER_STEP, which the caller runs. A fused pair is one operation if its halves run at the
  /// same time.
  void bind_all() {
    int const count = program().length(rank_) - (program().plan.forward_only ? 0 : 1);
    operations_.reserve(static_cast<std::size_t>(count));
    for (int p = 0; p < count; ++p) {
      operation& o = operations_.emplace_back(bind(at(p)));
      if (o.what->op.fused == 0 || !streams_->two()) continue;
      operation& half = second_halves_.emplace_back(bind(at(++p)));
      half.measured = false;  // the F that runs at the same time also allocates
      o.other_half = &half;
      o.turn = &executor::pair;
    }
  }
  operation bind(instruction const& i) {
    operation o{.what = &i};
    runner_.bind(o);
    kind const what = i.op.kind;
    if (!o.computes()) {
      o.work = work_of(what);
      o.turn = o.work == &executor::nothing ? o.work : &executor::simple;
      return o;
    }
    o.turn = &executor::computation;
    o.given = runs_backward(what) ? &gradients_of_outputs_ : &inputs_;
    o.measured =
        memory_ && memory_->watches() && (what == kind::forward || what == kind::recompute || what == kind::backward_input);
    o.fetch = fetch_of(o);
    if (row_of(what).from > 0 && before_backward_ && fetch_first_ == nullptr)
      fetch_first_ = std::exchange(o.fetch, &executor::fetch_after_weighing);
    return o;
  }
  operation::method work_of(kind what) const {
    if (is_own(what)) return &executor::own_action;
    if (is_send(what)) return &executor::send;
    if (is_receive(what)) return &executor::post_receive;
    if (is_wait(what)) return &executor::wait_send;
    if (what == kind::reduce_gradients) return &executor::start_sum;
    if (what == kind::unshard) return unshard_ ? &executor::unshard : &executor::nothing;
    throw std::logic_error(std::string("no method carries out ") + letters_of(what));
  }
  operation::method fetch_of(operation const& o) const {
    int const from = row_of(o.what->op.kind).from;
    if (from == 0) return &executor::nothing;
    if (o.takes != nullptr) return &executor::fetch_from_neighbour;
    if (o.what->source != no_slot) return &executor::fetch_from_peer;
    return from < 0 ? &executor::fetch_from_batch : &executor::fetch_from_loss;
  }

  // Runs operations.

  /// Executes one operation. \param number index from 0, in the order of the program
  void execute(int number) {
    operation const& o = operations_[static_cast<std::size_t>(number)];
    (this->*o.turn)(o);
  }

  /// Executes F, B, I, W or R alone.
  void computation(operation const& o) {
    if (o.what->op.kind == kind::forward) o.slot->lane = 0;
    std::size_t const entry = record_.add(*o.what);
    try {
      record_.before(*o.what);
      prepare(o);
      compute(o, entry);
      retire(o);
      record_.after(*o.what);
    } catch (...) {
      record_.rethrow(*o.what);
    }
  }

  /// Executes a fused pair whose halves run at the same time.
  void pair(operation const& f) {
    operation const& b = *f.other_half;
    auto const enter = [&](operation const& half) {
      std::size_t const entry = record_.add(*half.what);
      record_.guard(*half.what, [&] {
        record_.before(*half.what);
        prepare(half);
      });
      return entry;
    };
    std::size_t const of_f = enter(f), of_b = enter(b);
    if (launches()) {
      for (std::size_t const entry : {of_f, of_b}) record_.starts(entry);
      record_.guard(*f.what, [&] {
        graphs_->launch(f, *frame_.batch);
        graphs_->launch(b, *frame_.batch);
      });
      for (std::size_t const entry : {of_f, of_b}) record_.ends(entry);
    } else {
      runner_.beside(
          f, b, *f.given, [&] { record_.guard(*f.what, [&] { compute(f, of_f); }); },
          [&] { record_.guard(*b.what, [&] { compute(b, of_b); }); });
    }
    for (operation const* const half : {&f, &b}) record_.guard(*half->what, [&] { record_.after(*half->what); });
    for (operation const* const half : {&f, &b}) retire(*half);
  }

  /// Executes a send, the post of a receive, a wait for a send, the start of a sum, an UNSHARD, or X, Y or Z.
  void simple(operation const& o) {
    std::size_t const entry = record_.add(*o.what);
    try {
      record_.before(*o.what);
      (this->*o.work)(o);
      record_.after(*o.what);
    } catch (...) {
      record_.rethrow(*o.what);
    }
    record_.trace().ends(entry);
  }
  void send(operation const& o) {
    comm_->post_send(o.what->peer, o.what->op, o.what->source, *o.takes);
    o.takes->clear();
  }
  void post_receive(operation const& o) { comm_->post_receive(o.what->peer, o.what->op, o.what->source); }
  void own_action(operation const& o) { runner_.own_action(o, frame_, record_.step()); }
  void wait_send(operation const& o) { comm_->wait_send(o.what->source); }
  void start_sum(operation const& o) {
    if (reduces_ && gradients_ != nullptr) gradients_->start_sums(o.stage());
  }
  void unshard(operation const& o) { unshard_(o.stage()); }
  /// Executes an UNSHARD if all parameters are gathered before a step begins; fetches for W and R, which take nothing.
  void nothing(operation const&) {}

  // Parts of a computation's execution.

  /// Fetches what a computation takes; for B, I and W, attaches the buffers of gradients. R needs no gradients: buffers are
  /// allocated at the first B or I.
  void prepare(operation const& o) {
    (this->*o.fetch)(o);
    if (graphs_) graphs_->bring(o, *o.given);
    if (gradients_ != nullptr && runs_backward(o.what->op.kind)) gradients_->attach(o.stage());
  }
  void fetch_from_batch(operation const& o) { *o.given = frame_.batch->inputs(o.micro_batch()); }
  void fetch_from_neighbour(operation const& o) { *o.given = std::exchange(*o.takes, {}); }
  void fetch_from_peer(operation const& o) {
    std::span<at::Tensor> const arrived = comm_->receive(o.what->source);
    o.given->assign(std::make_move_iterator(arrived.begin()), std::make_move_iterator(arrived.end()));
  }
  void fetch_from_loss(operation const& o) {
    o.given->clear();
    if (launches()) return;  // `graph_runner::launch` writes the gradient
    bool const nothing = frame_.batch->counts_nothing(o.micro_batch());
    o.given->push_back(nothing ? at::Tensor() : runner_.loss_gradient(o, frame_.batch->gradient_weight(o.micro_batch())));
  }
  /// Fetches for the rank's first B or I, after `before_backward`, as B and I need the weights of microbatches.
  void fetch_after_weighing(operation const& o) {
    before_backward_();
    (this->*fetch_first_)(o);
  }

  /// Runs a computation; one half of a pair runs in another thread.
  void compute(operation const& o, std::size_t entry) {
    profiler_range const label(o.what->op, record_.slices(), streams_->where().is_cuda());
    record_.starts(entry);
    if (launches()) {
      graphs_->launch(o, *frame_.batch);
    } else if (o.measured) {
      memory_->measure(*o.what, *o.given, *o.slot, [&] { runner_.compute(o, frame_, *o.given); });
    } else {
      runner_.compute(o, frame_, *o.given);
    }
    record_.ends(entry);
  }
  void retire(operation const& o) {
    runner_.retire(o);
    if (graphs_) graphs_->retire(o);
    record_.trace().chunks_change(in_flight_change(o.what->op.kind, program().plan.forward_only));
  }

  /// Writes the peak of device memory in this step so far to the trace, and tells `receive_late` whether memory is scarce.
  void note_memory() {
    if (!memory_->watches()) return;
    record_.trace().took(memory_->peak(graphs_ ? graphs_->captured_bytes() : 0));
    comm_->receive_late(memory_->is_tight());
  }

  /// Whether the current run's computations are launched as graphs.
  bool launches() const { return graphs_ && graphs_->launches(); }
  instruction const& at(int position) const { return program().at(rank_, position); }

  /// Refuses a batch that a stage changed in place, since the beginning of the run may have to be computed again.
  void check_batch() const {
    for (int m = 0; m < frame_.batch->count(); ++m) {
      if (!frame_.batch->was_changed(m)) continue;
      throw usage_error("a stage changes microbatch " + std::to_string(m) +
                            " in place, and so the step cannot be done over: clone it first, or do without post_validation",
                        {comm_->topology().global_rank, -1, record_.step(), ""});
    }
  }

  proved_program program_;
  transport* comm_;
  int rank_;
  long number_;  // identifies this executor among the users of the transport
  gradient_store* gradients_;
  std::function<void()> before_backward_;
  std::function<void(int)> unshard_;
  std::shared_ptr<compute_streams> streams_;
  action_record record_;
  std::optional<memory_meter> memory_;  // on an accelerator, or with graphs
  stage_runner runner_;
  std::optional<graph_runner> graphs_;
  std::vector<operation> operations_;
  std::deque<operation> second_halves_;      // of fused pairs; elements keep their addresses
  operation::method fetch_first_ = nullptr;  // fetches for the first B or I, after `before_backward`
  std::optional<speculation> speculation_;

  // Of the current run.
  step_frame frame_;
  bool reduces_ = true;
  bool ahead_ = false;            // between run_ahead and finish
  bool broken_ = false;           // a run or optimizer turn has not ended
  tensors inputs_;                // arguments of the current F
  tensors gradients_of_outputs_;  // arguments of the current B or I
};

}  // namespace chevron::detail
