#pragma once
// long: one interpreter: the switch over all instructions and what each of them does

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/comm/stage_failure.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/execution/graph_runner.hpp>
#include <chevron/run/execution/speculation.hpp>
#include <chevron/run/execution/stage_runner.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/trace/allocator_stats.hpp>
#include <chevron/run/trace/event_timer.hpp>
#include <chevron/run/trace/profiler_range.hpp>
#include <chevron/run/trace/rank_trace.hpp>

/// \file
/// Runs one rank's part of a program.

namespace chevron {

/// What the executor hands out while it runs.
struct executor_hooks {
  std::function<void(int stage)> reduce_gradients;  ///< the stage's gradients of this step are complete
  std::function<void()> optimizer_step;             ///< all of this rank's are
  std::function<void(int stage)> before_gradients;  ///< a B or W is about to add to the stage's gradients
  std::uint64_t seed = 0;                           ///< of what stages draw (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};      ///< stages and loss run under autocast to this
  std::shared_ptr<compute_streams> streams = {};    ///< what to compute on; empty: the CPU, one thing after the other
  std::shared_ptr<graph_maker> graphs = {};         ///< captures steady runs; empty: none are captured
  std::function<void()> before_capture = {};        ///< attaches every `.grad` to its final buffer, since graphs record addresses
};

/// One rank's interpreter of a program: a loop over its instructions.
///
/// All ranks must run the same program set, with microbatches of the same count, and call `run` alike and in the same order. Each
/// drives its own transport from one thread.
///
/// Who keeps what. Microbatches under way are the computations' (stage_runner.hpp): a received tensor is moved into their graph.
/// A sent tensor is the transport's from `post_send` to `wait_send`. Stages are the caller's.
///
/// Who waits on whom. The transport is driven from here alone: what a fused pair needs is received before it, and sent after.
/// Where computations are launched as graphs (graph_runner.hpp), all else goes as it does without.
///
/// Failure. A transport's error passes through; whatever a stage or the loss throws becomes a `stage_error` with rank, step and
/// action, and other ranks are told of it through the transport. After any of them the step is lost and the executor refuses to
/// run again: parameters' gradients are half added up.
class executor {
 public:
  /// Collective.
  /// \param stages all stages of the model by number; those not on this rank may be empty
  executor(proved_program program, transport& comm, std::vector<stage>& stages, loss_function loss, executor_hooks hooks)
      : proved_(std::move(program)),
        program_(proved_.view()),
        comm_(&comm),
        rank_(comm.topology().pipeline_rank()),
        work_(program_, rank_, stages, std::move(loss), {hooks.seed, comm.topology().replica(), hooks.autocast},
              hooks.streams ? hooks.streams : std::make_shared<compute_streams>(at::kCPU, false)),
        hooks_(std::move(hooks)),
        clock_(work_.streams().where()),
        memory_(program_.plan.forward_only ? at::Device(at::kCPU) : work_.streams().where()),
        kept_(static_cast<std::size_t>(program_.plan.stages)),
        outputs_(program_.plan.forward_only ? static_cast<std::size_t>(program_.plan.size.micro_batches) : 0) {
    record_.reserve(static_cast<std::size_t>(program_.length(rank_)));
    if (hooks_.graphs) {
      captured_ = std::make_unique<graph_runner>(hooks_.graphs, program_, rank_, work_, memory_, hooks_.before_capture,
                                                 [this](instruction const& i) { attach(i); });
    }
    comm.connect(edges_of(program_));
  }
  executor(executor const&) = delete;
  executor& operator=(executor const&) = delete;

  /// Tells the transport how many slots this program uses: once, and again after another program used it.
  /// \param more slots for what the caller sends besides; they stand behind the program's
  void open(slot_counts more = {}) {
    slot_counts const own = slots();
    comm_->open({own.activation, own.receive + more.receive, own.send + more.send});
  }
  slot_counts slots() const { return program_.slots[rank_]; }

  /// Runs the program once over these microbatches.
  /// \param verdict if given, the parameters may yet be taken back: asked once, at the end of what may run before that is known
  /// (speculation.hpp), whether they stand. If not, what was done so far is withdrawn, and the step starts over. Given on all
  /// ranks or on none, with the same answer.
  void run(split_batch const& batch, long step, std::function<bool()> const& verdict = {}) {
    if (broken_) throw usage_error("an earlier step failed on this rank: nothing can be run after it", at_action({}, step));
    broken_ = true;
    compute_streams::scope const here(work_.streams());
    record_.begin_step(step);
    clock_.begin_step();
    memory_.begin_step();
    comm_->begin_step(step);
    launching_ = captured_ && captured_->prepare(batch, [&](instruction const& i, auto const& work) {
      with_error_context(i, step, nullptr, work);
    });
    int const length = program_.length(rank_);
    int next = 0;
    if (verdict) {
      if (!speculation_) speculation_ = speculation_of(program_, rank_);
      auto const& later = speculation_->after_verdict;
      while (next < speculation_->end) next = later[static_cast<std::size_t>(next)] ? next + 1 : execute(next, batch, step);
      check_batch(batch, step);
      if (verdict()) {
        for (int i = 0; i < speculation_->end; ++i) {
          if (later[static_cast<std::size_t>(i)]) execute(i, batch, step);
        }
      } else {
        withdraw(*speculation_);
        next = 0;
      }
    }
    while (next < length) next = execute(next, batch, step);
    note_memory();
    broken_ = false;
  }

  program_view program() const { return program_; }
  rank_trace const& last_record() const { return record_; }
  /// The same with the times of an accelerator, which it waits for.
  rank_trace const& synchronize_record() {
    clock_.settle(record_);
    return record_;
  }
  /// Were the last run's computations launched as graphs?
  bool launched() const { return launching_; }
  /// Why not; empty where they were.
  std::string graph_fallback_reason() const { return captured_ ? captured_->why_not() : "no graphs were asked for"; }
  /// The mean loss of each microbatch; undefined tensors on ranks without the last stage, and where there is no loss.
  tensors const& losses() const { return work_.losses(); }
  /// Of a program that only runs forward, without a loss: the last stage's outputs by microbatch, on its rank.
  std::vector<tensors>& outputs() { return outputs_; }

 private:
  /// Runs the instruction at this position, and gives the position of the next.
  int execute(int position, split_batch const& batch, long step) {
    instruction const& i = program_.at(rank_, position);
    if (i.op.fused != 0 && work_.streams().two()) return execute_pair(position, batch, step);
    std::size_t const entry = record_.add(i.op);
    with_error_context(i, step, [&] { carry_out(i, batch, entry); });
    if (!is_compute(i.op.kind)) record_.ends(entry);
    return position + 1;
  }

  /// Runs the two halves of a fused pair beside each other.
  int execute_pair(int position, split_batch const& batch, long step) {
    instruction const& f = program_.at(rank_, position);
    instruction const& b = program_.at(rank_, position + 1);
    std::size_t const of_f = record_.add(f.op);
    with_error_context(f, step, [&] { fetch_inputs(f, batch); });
    std::size_t const of_b = record_.add(b.op);
    with_error_context(b, step, [&] {
      fetch_output_gradients(b, batch);
      attach(b);
    });
    if (launching_) {
      for (std::size_t const entry : {of_f, of_b}) begins(entry);
      with_error_context(f, step, [&] { captured_->launch(f); });
      for (instruction const* const half : {&f, &b}) captured_->copy_out(*half, comm_->is_zero_copy());
      for (std::size_t const entry : {of_f, of_b}) ends(entry);
    } else {
      work_.beside(
          f, b, [&] { with_error_context(f, step, [&] { compute(f, batch, of_f); }); },
          [&] { with_error_context(b, step, [&] { compute(b, batch, of_b); }); });
    }
    retire(f);
    retire(b);
    return position + 2;
  }

  template <class Work>
  void with_error_context(instruction const& i, long step, Work const& work) const {
    with_error_context(i, step, comm_, work);
  }

  /// Says of what `work` throws which action it was.
  /// \param told_by see `telling_errors`
  template <class Work>
  void with_error_context(instruction const& i, long step, transport* told_by, Work const& work) const {
    detail::telling_errors(
        told_by, [&] { return thrower(i); }, [&] { return at_action(i, step); }, work);
  }

  /// What may have to be computed again must find the batch as it was.
  void check_batch(split_batch const& batch, long step) const {
    for (int m = 0; m < batch.count(); ++m) {
      if (!batch.was_changed(m)) continue;
      throw usage_error("a stage changes microbatch " + std::to_string(m) +
                            " in place, and so the step cannot be done over: clone it first, or do without post_validation",
                        {comm_->topology().global_rank, -1, step, ""});
    }
  }

  /// Lets go of all that was computed, and takes what others sent meanwhile off the channels: a message is received before
  /// the next of its edge is posted, so that slots are used as the program uses them.
  void withdraw(speculation const& what) {
    for (int const position : what.unread) {
      instruction const& i = program_.at(rank_, position);
      if (position >= what.end) comm_->post_receive(i.peer, i.op, i.source);
      comm_->receive(i.source);
    }
    for (int const position : what.sending) comm_->wait_send(program_.at(rank_, position).source);
    work_.drop();
    record_.start_over();
    clock_.start_over();
  }

  error_context at_action(instruction const& i, long step) const {
    return {comm_->topology().global_rank, -1, step, to_text(i.op).str()};
  }

  static std::string thrower(instruction const& i) {
    return is_compute(i.op.kind) ? "stage " + std::to_string(i.op.stage) + " threw: " : std::string();
  }

  void carry_out(instruction const& i, split_batch const& batch, std::size_t entry) {
    switch (i.op.kind) {
      case kind::forward:
        fetch_inputs(i, batch);
        work_.of(i).lane = 0;
        return carry_out_computation(i, batch, entry);
      case kind::backward:
      case kind::backward_input:
        fetch_output_gradients(i, batch);
        attach(i);
        return carry_out_computation(i, batch, entry);
      case kind::backward_weight:
        attach(i);
        return carry_out_computation(i, batch, entry);
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
        if (hooks_.reduce_gradients) hooks_.reduce_gradients(static_cast<int>(i.op.stage));
        return;
      case kind::optimizer_step:
        if (hooks_.optimizer_step) hooks_.optimizer_step();
        return;
    }
  }

  void attach(instruction const& i) {
    bool const adds = i.op.kind == kind::backward || i.op.kind == kind::backward_weight;
    if (adds && hooks_.before_gradients) hooks_.before_gradients(static_cast<int>(i.op.stage));
  }

  void carry_out_computation(instruction const& i, split_batch const& batch, std::size_t entry) {
    compute(i, batch, entry);
    retire(i);
  }

  /// F, B, I or W alone: what it needs has been brought. Of a pair, one of these runs in another thread.
  void compute(instruction const& i, split_batch const& batch, std::size_t entry) {
    profiler_range const label(i.op, work_.streams().where().is_cuda());
    begins(entry);
    if (launching_) {
      captured_->launch(i);
      captured_->copy_out(i, comm_->is_zero_copy());
    } else if (memory_.watches() && i.op.kind == kind::forward) {
      forward_and_measure(i, batch);
    } else {
      work_.compute(i, batch, record_.step());
    }
    ends(entry);
  }
  void begins(std::size_t entry) {
    record_.starts(entry);
    clock_.starts(entry);
  }
  void ends(std::size_t entry) {
    clock_.ends(entry);
    record_.ends(entry);
  }

  /// Runs F and measures the bytes that it retains until its backward: the growth of the allocator and the inputs received for
  /// it, less outputs that are held only to be sent.
  void forward_and_measure(instruction const& i, split_batch const& batch) {
    std::int64_t before = memory_.in_use();
    bool const came = i.op.stage > 0 && i.local == no_slot;
    for (at::Tensor const& t : work_.inputs())
      before -= came && t.defined() ? static_cast<std::int64_t>(t.storage().nbytes()) : 0;
    work_.compute(i, batch, record_.step());
    std::int64_t kept = memory_.in_use() - before;
    for (at::Tensor const& t : work_.of(i).outputs) {
      if (t.defined() && t.storage().use_count() == 1) kept -= static_cast<std::int64_t>(t.storage().nbytes());
    }
    kept_[i.op.stage] = std::max(kept_[i.op.stage], kept);
  }

  void note_memory() {
    if (!memory_.watches()) return;
    allocator_use use = memory_.peak(peak_bytes(program_.plan, size_view{kept_.data(), nullptr, 1}, rank_));
    // Graphs ask the allocator for nothing: what they use it saw when they were captured.
    if (launching_) use.active = std::max(use.active, captured_->bytes());
    record_.took(use);
  }

  /// What a computation that is done means for others.
  void retire(instruction const& i) {
    bool const training = !program_.plan.forward_only;
    if (i.op.kind != kind::forward) {
      if (i.op.kind != kind::backward_input) record_.chunk_ends();
      return;
    }
    activation& slot = work_.of(i);
    if (std::exchange(slot.drew, false) && captured_) captured_->mark_stochastic(i);
    if (training) record_.chunk_starts();
    if (!work_.is_last(i)) return;
    work_.losses()[i.op.micro_batch] = std::move(slot.loss);
    slot.loss = at::Tensor();
    if (!training && !work_.has_loss()) {
      outputs_[i.op.micro_batch] = std::move(slot.outputs);
      slot.outputs.clear();
    }
  }

  void send(instruction const& i, tensors& values) {
    comm_->post_send(i.peer, i.op, i.source, values);
    values.clear();
  }

  /// Brings a stage's inputs: from the batch, from the neighbour on this rank, or from afar.
  void fetch_inputs(instruction const& i, split_batch const& batch) {
    tensors& inputs = work_.inputs();
    if (i.op.stage == 0) {
      inputs = batch.inputs(static_cast<int>(i.op.micro_batch));
    } else if (i.local != no_slot) {
      inputs = std::move(work_.neighbour_of(i).outputs);
      work_.neighbour_of(i).outputs.clear();
    } else {
      receive_into(inputs, i);
    }
    if (launching_) captured_->copy_in(i, inputs);
  }

  /// Brings the gradients of a stage's outputs: from the loss, from the neighbour on this rank, or from afar.
  void fetch_output_gradients(instruction const& i, split_batch const& batch) {
    tensors& gradients = work_.output_gradients();
    if (work_.is_last(i)) {
      if (batch.counts_nothing(static_cast<int>(i.op.micro_batch))) {
        gradients.emplace_back();
        return;
      }
      double const weight = batch.gradient_weight(static_cast<int>(i.op.micro_batch));
      if (launching_) return captured_->copy_in(i, weight);
      at::Tensor const& loss = work_.losses()[i.op.micro_batch];
      gradients.push_back(at::full(loss.sizes(), weight, loss.options()));
    } else if (i.local != no_slot) {
      gradients = std::move(work_.neighbour_of(i).input_gradients);
      work_.neighbour_of(i).input_gradients.clear();
    } else {
      receive_into(gradients, i);
    }
    if (launching_) captured_->copy_in(i, gradients);
  }

  void receive_into(tensors& out, instruction const& i) {
    std::span<at::Tensor> const arrived = comm_->receive(i.source);
    out.clear();
    for (at::Tensor& t : arrived) out.push_back(std::move(t));
    if (captured_ && !launching_) captured_->record_signature(i, out);
  }

  proved_program proved_;
  program_view program_;  // of proved_
  transport* comm_;
  int rank_;
  stage_runner work_;
  executor_hooks hooks_;
  event_timer clock_;
  allocator_stats memory_;
  std::vector<std::int64_t> kept_;  // bytes that a microbatch keeps, by stage
  std::unique_ptr<graph_runner> captured_;
  bool launching_ = false;  // in this run
  std::vector<tensors> outputs_;
  rank_trace record_;
  std::optional<speculation> speculation_;
  bool broken_ = false;
};

}  // namespace chevron
