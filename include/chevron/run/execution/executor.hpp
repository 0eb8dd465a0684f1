#pragma once
// long: one interpreter: the switch over all instructions and what each of them does

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/run/comm/message_checksum.hpp>
#include <chevron/run/comm/stage_failure.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/execution/activation_meter.hpp>
#include <chevron/run/execution/deferred_weights.hpp>
#include <chevron/run/execution/gradient_store.hpp>
#include <chevron/run/execution/graph_runner.hpp>
#include <chevron/run/execution/memory_meter.hpp>
#include <chevron/run/execution/speculation.hpp>
#include <chevron/run/execution/stage_runner.hpp>
#include <chevron/run/failure/fault_point.hpp>
#include <chevron/run/failure/last_actions.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/trace/event_timer.hpp>
#include <chevron/run/trace/profiler_range.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// Runs one rank's part of a program.

namespace chevron {

/// How an executor computes.
struct executor_settings {
  std::uint64_t seed = 0;                         ///< of what stages draw (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};    ///< stages and loss run under autocast to this
  std::shared_ptr<compute_streams> streams = {};  ///< what to compute on; empty: the CPU, one thing after the other
  std::shared_ptr<graph_maker> graphs = {};       ///< captures steady runs; empty: none are captured
  int deferred_weights = 0;      ///< so many W's may be held back until this rank would wait (deferred_weights.hpp)
  bool check_messages = false;   ///< messages go with a checksum (message_checksum.hpp); the same on all ranks
  int lowest_trained = 0;        ///< no stage before it has a parameter that needs a gradient; the same on all ranks
  own_handler own_actions = {};  ///< runs X, Y and Z
  /// Called in each run, before the rank's first B or I, which needs the microbatches' weights; F's need none. Empty: not called.
  std::function<void()> before_backward = {};
};

/// What came of a run. It belongs to the executor, and lasts until the next run.
struct run_result {
  tensors const& losses;          ///< mean loss of each microbatch; undefined without the last stage, and where there is no loss
  std::vector<tensors>& outputs;  ///< by microbatch, the last stage's: of a program that only runs forward, without a loss
  rank_trace const& trace;        ///< what was done and when
  bool used_graphs;               ///< computations were launched as graphs
};

/// One rank's interpreter of a program: a loop over its instructions.
///
/// All ranks must run the same program set, with microbatches of the same count, and call `run` alike and in the same order. Each
/// drives its own transport from one thread.
///
/// Who keeps what. Microbatches under way are the stage runner's (stage_runner.hpp): a received tensor is moved into their graph.
/// A sent tensor is the transport's from `post_send` to `wait_send`. Stages are the caller's, and so is the optimizer: a run of a
/// training program ends before its last instruction, OPTIMIZER_STEP, which `optimizer_step` then times and guards.
///
/// Who waits on whom. The transport is driven from here alone: what a fused pair needs is received before it, and sent after.
/// Where computations are launched as graphs (graph_runner.hpp), all else goes as it does without. Where W's are held back
/// (deferred_weights.hpp), they run when something that comes after them would wait, and all else keeps its order.
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
      : proved_(std::move(program)),
        program_(proved_.view()),
        comm_(&comm),
        rank_(comm.topology().pipeline_rank()),
        number_(comm.new_program()),
        gradients_(gradients),
        work_(program_, rank_, stages, std::move(loss),
              {settings.seed, comm.topology().replica(), settings.autocast, settings.lowest_trained, settings.own_actions},
              settings.streams ? settings.streams : std::make_shared<compute_streams>(at::kCPU, false)),
        clock_(work_.streams().where()),
        memory_(program_, rank_, work_.streams().where()),
        deferred_(program_, settings.deferred_weights),
        check_messages_(settings.check_messages),
        before_backward_(std::move(settings.before_backward)),
        outputs_(program_.plan.forward_only ? static_cast<std::size_t>(program_.plan.size.micro_batches) : 0),
        kept_(comm.topology(), program_.plan, kept_trace_) {
    trace_.reserve(static_cast<std::size_t>(program_.length(rank_)));
    if (settings.graphs) {
      captured_ = std::make_unique<graph_runner>(settings.graphs, program_, rank_, work_, memory_.stats(), gradients_);
    }
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
  slot_counts slots() const { return program_.slots[rank_]; }

  /// Runs the program once over these microbatches.
  /// \param reduces whether sums of gradients over the replicas start where the program says so; false: more runs add to them first
  run_result run(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(work_.streams());
    begin(batch, step, reduces);
    return finish();
  }

  /// The beginning of such a run, on parameters that may yet be taken back: all that may run before that is known
  /// (speculation.hpp). Then comes `finish`, after `withdraw` where they were taken back; on all ranks alike.
  /// \throws usage_error where a stage changed the batch, so that nothing could be computed again
  void run_ahead(split_batch const& batch, long step, bool reduces = true) {
    compute_streams::scope const here(work_.streams());
    begin(batch, step, reduces);
    if (!speculation_) speculation_ = speculation_of(program_, rank_);
    ahead_ = true;
    while (next_ < speculation_->end) comes_later(next_) ? skip_next() : execute_next();
    check_batch();
  }

  /// Lets go of all that `run_ahead` computed, and takes what others sent meanwhile off the channels: a message is received
  /// before the next of its edge is posted, so that slots are used as the program uses them. The run starts over.
  void withdraw() {
    compute_streams::scope const here(work_.streams());
    speculation const& what = *speculation_;
    for (int const position : what.unread) {
      instruction const& i = program_.at(rank_, position);
      if (position >= what.end) comm_->post_receive(i.peer, i.op, i.source);
      comm_->receive(i.source);
    }
    for (int const position : what.sending) comm_->wait_send(program_.at(rank_, position).source);
    work_.drop();
    trace_.start_over();
    clock_.start_over();
    ahead_ = false;
    next_ = 0;
  }

  /// The rest of a run.
  run_result finish() {
    compute_streams::scope const here(work_.streams());
    if (std::exchange(ahead_, false)) {
      int const end = next_;
      for (next_ = 0; next_ < end;) comes_later(next_) ? execute_next() : skip_next();
    }
    int const end = program_.length(rank_) - (program_.plan.forward_only ? 0 : 1);
    while (next_ < end) execute_next();
    while (!deferred_.empty()) run_deferred();
    note_memory();
    broken_ = false;
    return {work_.losses(), outputs_, trace_, launching_};
  }

  /// Does `step` as the OPTIMIZER_STEP that ends a training program: its time is in the trace, its memory in the peak, and errors
  /// say where they come from.
  template <class Step>
  void optimizer_step(Step const& step) {
    broken_ = true;
    instruction const& i = program_.at(rank_, program_.length(rank_) - 1);
    std::size_t const entry = trace_.add(i.op);
    with_error_context(i, comm_, [&] {
      detail::fault_point(global_rank(), trace_.step(), "before", i.op);
      step();
      detail::fault_point(global_rank(), trace_.step(), "after", i.op);
    });
    trace_.ends(entry);
    note_memory();
    memory_.end_step(trace_.step());
    broken_ = false;
  }

  /// Counts in the next run what stages hold of a microbatch (activation_meter.hpp): it computes the same, more slowly. Nothing
  /// is known of computations that are launched as graphs, nor of a program that only runs forward.
  void measure_bytes() {
    if (!program_.plan.forward_only) meter_.emplace(program_.plan);
  }
  /// By stage, if the last run was measured: gives it once.
  std::optional<std::vector<measured_bytes>> take_measured_bytes() {
    if (!meter_ || broken_) return {};
    work_.measured_by(nullptr);
    auto out = meter_->found();
    meter_.reset();
    return out;
  }

  program_view program() const { return program_; }
  rank_trace const& last_trace() const { return trace_; }
  /// The same with the times of an accelerator, for which it waits.
  rank_trace const& synchronize_trace() {
    clock_.settle(trace_);
    return trace_;
  }
  /// Why the last run's computations were not launched as graphs; empty where they were.
  std::string graph_fallback_reason() const { return captured_ ? captured_->why_not() : "no graphs were asked for"; }

 private:
  void begin(split_batch const& batch, long step, bool reduces) {
    if (broken_) throw usage_error("an earlier step failed on this rank: nothing can be run after it", at_action({}, step));
    broken_ = true;
    batch_ = &batch;
    next_ = 0;
    ahead_ = false;
    reduces_ = reduces;
    weighed_ = false;
    trace_.begin_step(step);
    clock_.begin_step();
    memory_.begin_step();
    deferred_.begin();
    comm_->begin_step(step);
    work_.measured_by(nullptr);  // captures are to be what they always are
    launching_ = captured_ &&
                 captured_->prepare(batch, [&](instruction const& i, auto const& work) { with_error_context(i, nullptr, work); });
    work_.measured_by(meter_ && !launching_ ? &*meter_ : nullptr);
  }

  /// Of what `run_ahead` comes to: must it wait for `finish`?
  bool comes_later(int position) const { return speculation_->after_verdict[static_cast<std::size_t>(position)]; }
  void skip_next() { ++next_; }

  /// Runs the instruction at `next_`, or with it the other half of its pair.
  void execute_next() {
    instruction const& i = program_.at(rank_, next_);
    if (i.op.fused != 0 && work_.streams().two()) return execute_pair(i, program_.at(rank_, next_ + 1));
    if (deferred_.on()) {
      if (i.op.kind == kind::backward_weight) return hold_back(i);
      make_way(i);
    }
    std::size_t const entry = trace_.add(i.op);
    with_error_context(i, comm_, [&] {
      detail::fault_point(global_rank(), trace_.step(), "before", i.op);
      carry_out(i, entry);
      detail::fault_point(global_rank(), trace_.step(), "after", i.op);
    });
    if (!is_compute(i.op.kind)) trace_.ends(entry);
    ++next_;
  }

  /// Runs the two halves of a fused pair beside each other.
  void execute_pair(instruction const& f, instruction const& b) {
    for (instruction const* const half : {&f, &b}) make_way(*half);
    std::size_t const of_f = trace_.add(f.op);
    with_error_context(f, comm_, [&] {
      detail::fault_point(global_rank(), trace_.step(), "before", f.op);
      fetch_inputs(f);
    });
    std::size_t const of_b = trace_.add(b.op);
    with_error_context(b, comm_, [&] {
      detail::fault_point(global_rank(), trace_.step(), "before", b.op);
      fetch_output_gradients(b);
      attach(b);
    });
    if (launching_) {
      for (std::size_t const entry : {of_f, of_b}) begins(entry);
      with_error_context(f, comm_, [&] { captured_->launch(f); });
      for (instruction const* const half : {&f, &b}) captured_->copy_out(*half, comm_->is_zero_copy());
      for (std::size_t const entry : {of_f, of_b}) ends(entry);
    } else {
      work_.beside(
          f, b, inputs_, [&] { with_error_context(f, comm_, [&] { compute(f, inputs_, of_f); }); },
          [&] { with_error_context(b, comm_, [&] { compute(b, gradients_of_outputs_, of_b); }); });
    }
    for (instruction const* const half : {&f, &b})
      with_error_context(*half, comm_, [&] { detail::fault_point(global_rank(), trace_.step(), "after", half->op); });
    retire(f);
    retire(b);
    next_ += 2;
  }

  /// A W's turn, where W's may be held back.
  void hold_back(instruction const& w) {
    if (deferred_.full()) run_deferred();
    deferred_.hold(w, work_.of(w).work);
    ++next_;
  }
  /// Runs W's that were held back until this may come before the others.
  void make_way(instruction const& i) {
    while (!deferred_.empty() && comes_after_deferred(i)) run_deferred();
  }
  bool comes_after_deferred(instruction const& i) {
    switch (i.op.kind) {
      case kind::forward:
        return deferred_.exceeds_limit(i.op) || (i.source != no_slot && !comm_->has_arrived(i.source));
      case kind::backward:
        // It adds to the gradients, too: after the W's that come before it, for the same bits.
        if (deferred_.holds_stage(i.op)) return true;
        [[fallthrough]];
      case kind::backward_input:
        return i.source != no_slot && !comm_->has_arrived(i.source);
      case kind::wait_send_forward:
      case kind::wait_send_backward:
        return !comm_->is_sent(i.source);
      case kind::reduce_gradients:
        return reduces_ && deferred_.holds_stage(i.op);
      default:
        return false;
    }
  }
  void run_deferred() {
    deferred_weights::held one = deferred_.next();
    instruction const& w = *one.what;
    std::size_t const entry = trace_.add(w.op);
    with_error_context(w, comm_, [&] {
      detail::fault_point(global_rank(), trace_.step(), "before", w.op);
      attach(w);
      profiler_range const label(w.op, false);
      begins(entry);
      work_.backward_weight(w, one.work, *batch_, trace_.step());
      ends(entry);
      detail::fault_point(global_rank(), trace_.step(), "after", w.op);
    });
    retire(w);
    deferred_.done(std::move(one));
  }

  /// Says of what `work` throws which action it was.
  /// \param told_by see `telling_errors`
  template <class Work>
  void with_error_context(instruction const& i, transport* told_by, Work const& work) const {
    detail::telling_errors(
        told_by, [&] { return thrower(i); }, [&] { return at_action(i, trace_.step()); }, work);
  }

  /// What may have to be computed again must find the batch as it was.
  void check_batch() const {
    for (int m = 0; m < batch_->count(); ++m) {
      if (!batch_->was_changed(m)) continue;
      throw usage_error("a stage changes microbatch " + std::to_string(m) +
                            " in place, and so the step cannot be done over: clone it first, or do without post_validation",
                        {comm_->topology().global_rank, -1, trace_.step(), ""});
    }
  }

  int global_rank() const { return comm_->topology().global_rank; }

  error_context at_action(instruction const& i, long step) const { return {global_rank(), -1, step, to_text(i.op).str()}; }

  static std::string thrower(instruction const& i) {
    if (is_own(i.op.kind)) return "own_actions threw: ";
    return is_compute(i.op.kind) ? "stage " + std::to_string(i.op.stage) + " threw: " : std::string();
  }

  void carry_out(instruction const& i, std::size_t entry) {
    switch (i.op.kind) {
      case kind::forward:
        fetch_inputs(i);
        work_.of(i).lane = 0;
        compute(i, inputs_, entry);
        return retire(i);
      case kind::backward:
      case kind::backward_input:
        fetch_output_gradients(i);
        attach(i);
        compute(i, gradients_of_outputs_, entry);
        return retire(i);
      case kind::backward_weight:
      case kind::recompute:
        attach(i);
        compute(i, gradients_of_outputs_, entry);
        return retire(i);
      case kind::own_x:
      case kind::own_y:
      case kind::own_z: {
        profiler_range const label(i.op, work_.streams().where().is_cuda());
        begins(entry);
        work_.own_action(i, trace_.step());
        return ends(entry);
      }
      case kind::send_forward:
        return send(i, work_.of(i).outputs);
      case kind::send_backward:
        return send(i, work_.of(i).input_gradients);
      case kind::receive_forward:
      case kind::receive_backward:
        return comm_->post_receive(i.peer, i.op, i.source);
      case kind::wait_send_forward:
      case kind::wait_send_backward:
        return comm_->wait_send(i.source);
      case kind::reduce_gradients:
        if (reduces_ && gradients_ != nullptr) gradients_->start_all_reduce(static_cast<int>(i.op.stage));
        return;
      case kind::optimizer_step:
        return;  // the caller's: a run ends before it
    }
  }

  /// Before a B, I or W.
  void attach(instruction const& i) {
    if (gradients_ != nullptr) gradients_->attach(static_cast<int>(i.op.stage));
  }

  /// F, B, I or W alone: what it needs has been brought. Of a pair, one of these runs in another thread.
  void compute(instruction const& i, tensors& given, std::size_t entry) {
    profiler_range const label(i.op, work_.streams().where().is_cuda());
    begins(entry);
    if (launching_) {
      captured_->launch(i);
      captured_->copy_out(i, comm_->is_zero_copy());
    } else if (memory_.watches() && i.op.kind == kind::forward) {
      memory_.measure(i, given, work_.of(i), [&] { work_.compute(i, *batch_, trace_.step(), given); });
    } else {
      work_.compute(i, *batch_, trace_.step(), given);
    }
    ends(entry);
  }
  void begins(std::size_t entry) {
    trace_.starts(entry);
    clock_.starts(entry);
  }
  void ends(std::size_t entry) {
    clock_.ends(entry);
    trace_.ends(entry);
  }
  void note_memory() {
    if (!memory_.watches()) return;
    trace_.took(memory_.peak(launching_ ? captured_->bytes() : 0));
    comm_->receive_late(memory_.is_tight());
  }

  /// What a computation that is done means for others.
  void retire(instruction const& i) {
    bool const training = !program_.plan.forward_only;
    activation& slot = work_.of(i);
    if (std::exchange(slot.drew, false) && captured_) captured_->mark_stochastic(i);
    if (i.op.kind != kind::forward) {
      if (!ends_cell(i.op.kind)) return;
      trace_.chunk_ends();
      deferred_.chunk_ends(i.op);
      return;
    }
    if (training) {
      trace_.chunk_starts();
      deferred_.chunk_starts(i.op);
    }
    if (!work_.is_last(i)) return;
    work_.losses()[i.op.micro_batch] = std::move(slot.loss);
    slot.loss = at::Tensor();
    if (!training && !work_.has_loss()) {
      outputs_[i.op.micro_batch] = std::move(slot.outputs);
      slot.outputs.clear();
    }
  }

  void send(instruction const& i, tensors& values) {
    if (check_messages_) detail::add_checksum(values);
    detail::message_fault_point(global_rank(), trace_.step(), i.op, values);
    comm_->post_send(i.peer, i.op, i.source, values);
    values.clear();
  }

  /// Brings a stage's inputs: from the batch, from the neighbour on this rank, or from afar.
  void fetch_inputs(instruction const& i) {
    if (i.op.stage == 0) {
      inputs_ = batch_->inputs(static_cast<int>(i.op.micro_batch));
    } else if (i.local != no_slot) {
      inputs_ = std::exchange(work_.neighbour_of(i).outputs, {});
    } else {
      receive_into(inputs_, i);
    }
    if (launching_) captured_->copy_in(i, inputs_);
  }

  /// Brings the gradients of a stage's outputs: from the loss, from the neighbour on this rank, or from afar.
  void fetch_output_gradients(instruction const& i) {
    if (!std::exchange(weighed_, true) && before_backward_) before_backward_();
    tensors& gradients = gradients_of_outputs_;
    if (work_.is_last(i)) {
      gradients.clear();
      if (batch_->counts_nothing(static_cast<int>(i.op.micro_batch))) {
        gradients.emplace_back();
        return;
      }
      double const weight = batch_->gradient_weight(static_cast<int>(i.op.micro_batch));
      if (launching_) return captured_->copy_in(i, weight);
      at::Tensor const& loss = work_.losses()[i.op.micro_batch];
      gradients.push_back(at::full(loss.sizes(), weight, loss.options()));
    } else if (i.local != no_slot) {
      gradients = std::exchange(work_.neighbour_of(i).input_gradients, {});
    } else {
      receive_into(gradients, i);
    }
    if (launching_) captured_->copy_in(i, gradients);
  }

  void receive_into(tensors& out, instruction const& i) {
    std::span<at::Tensor> const arrived = comm_->receive(i.source);
    out.clear();
    for (at::Tensor& t : arrived) out.push_back(std::move(t));
    if (check_messages_) check_message(out, i);
    if (captured_ && !launching_) captured_->record_signature(i, out);
  }

  /// \param i the F, B or I that needs these tensors
  void check_message(tensors& arrived, instruction const& i) {
    int const sender = comm_->topology().global_of(program_.plan.rank_of[step_graph(program_.plan).from(i.op)]);
    try {
      detail::take_checksum(arrived, {global_rank(), sender, trace_.step(), to_text(detail::receive_for(i.op)).str()});
    } catch (corrupt_message_error const& e) {
      comm_->fail(e);
      throw;
    }
  }

  proved_program proved_;
  program_view program_;  // of proved_
  transport* comm_;
  int rank_;
  long number_;  // among the programs of the transport
  gradient_store* gradients_;
  stage_runner work_;
  event_timer clock_;
  memory_meter memory_;
  std::optional<activation_meter> meter_;
  deferred_weights deferred_;
  bool check_messages_;
  std::function<void()> before_backward_;
  std::unique_ptr<graph_runner> captured_;
  std::vector<tensors> outputs_;
  std::shared_ptr<rank_trace> kept_trace_ = std::make_shared<rank_trace>();  // outlives this where the rank fails
  rank_trace& trace_ = *kept_trace_;
  std::optional<speculation> speculation_;
  bool broken_ = false;  // by a run that did not come to its end

  // Of the run under way.
  split_batch const* batch_ = nullptr;
  int next_ = 0;                  // position in the program
  bool ahead_ = false;            // between run_ahead and finish
  bool reduces_ = true;           // starts sums over the replicas
  bool weighed_ = false;          // before_backward_ was called
  bool launching_ = false;        // graphs
  tensors inputs_;                // of the F under way
  tensors gradients_of_outputs_;  // of the B or I under way

  detail::actions_keeper kept_;
};

}  // namespace chevron
