#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/profiler_range.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/execute/action_record.hpp>
#include <chevron/run/execute/executor_settings.hpp>
#include <chevron/run/execute/gradient_store.hpp>
#include <chevron/run/execute/graph_runner.hpp>
#include <chevron/run/execute/memory_meter.hpp>
#include <chevron/run/execute/operation.hpp>
#include <chevron/run/execute/stage_runner.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Binds a rank's instructions to slots and methods, once, and executes them.

namespace chevron::detail {

/// The operations of one rank, in the order of its program. `bind` chooses each operation's methods: options that are off
/// (graphs, `memory_meter`) bind no method, so they cost no time in a step. One exception: each computation tests whether
/// `activation_meter` is on.
///
/// The stage runner owns the tensors of unfinished microbatches, received tensors included. The transport owns a sent tensor
/// from `post_send` to `wait_send`. During a run, no other object drives the transport: messages for a fused pair are received
/// before both halves run, and sent after both.
class bound_program {
 public:
  bound_program(program_view const& program, transport& comm, std::vector<stage>& stages, loss_function loss,
                executor_settings settings, gradient_store* gradients)
      : plan_(program.plan),
        comm_(&comm),
        gradients_(gradients),
        before_backward_(settings.before_backward),
        unshard_(settings.unshard),
        streams_(settings.streams ? settings.streams : std::make_shared<compute_streams>(at::kCPU, false)),
        record_(comm, program, streams_->where()),
        memory_(program, comm.topology().pipeline_rank(), streams_->where()) {
    settings.streams = streams_;
    if (settings.graphs) {
      runner_ = std::make_unique<graph_runner>(program, comm.topology(), stages, std::move(loss), settings, memory_.stats(),
                                               gradients, comm.is_zero_copy());
    } else {
      runner_ = std::make_unique<stage_runner>(program, comm.topology(), stages, std::move(loss), settings);
    }
    bind_all(program, comm.topology().pipeline_rank());
  }
  bound_program(bound_program const&) = delete;
  bound_program& operator=(bound_program const&) = delete;

  /// The number of operations. A fused pair is one operation if its halves run at the same time; OPTIMIZER_STEP, which the
  /// caller runs, is not counted.
  std::size_t size() const { return operations_.size(); }
  compute_streams& streams() const { return *streams_; }
  stage_runner& runner() { return *runner_; }
  stage_runner const& runner() const { return *runner_; }
  action_record& record() { return record_; }
  action_record const& record() const { return record_; }
  memory_meter& memory() { return memory_; }

  /// Begins a run over these microbatches.
  /// \param reduces whether the program's REDUCE_GRADs start the sums of gradients over the replicas
  void begin(split_batch const& batch, long step, bool reduces) {
    frame_ = {&batch, step};
    reduces_ = reduces;
    record_.begin_step(step);
    memory_.begin_step();
    comm_->slices(record_.slices());
    comm_->begin_step(step);
    runner_->begin(operations_, frame_, record_);
  }
  /// Executes one operation. \param number index from 0, in the order of the program
  void carry_out(std::size_t number) {
    operation const& o = operations_[number];
    (this->*o.turn)(o);
  }
  /// Drops all unfinished microbatches, as the run starts over.
  void start_over() {
    runner_->drop();
    record_.start_over();
  }
  /// Ends a run after its last operation: records the peak of memory, and compares the first run's slices.
  void finish() {
    note_memory();
    runner_->compare_slices(*comm_, frame_);
  }

  /// Writes the peak of device memory in this step so far to the trace, and tells `receive_late` whether memory is scarce.
  void note_memory() {
    if (!memory_.watches()) return;
    record_.trace().took(memory_.peak(runner_->captured_bytes()));
    comm_->receive_late(memory_.is_tight());
  }

 private:
  void bind_all(program_view const& program, int rank) {
    int const count = program.length(rank) - (plan_.forward_only ? 0 : 1);
    operations_.reserve(static_cast<std::size_t>(count));
    for (int p = 0; p < count; ++p) {
      operation& o = operations_.emplace_back(bind(program.at(rank, p)));
      if (o.what->op.fused == 0 || !streams_->two()) continue;
      operation& half = second_halves_.emplace_back(bind(program.at(rank, ++p)));
      half.compute = &bound_program::compute;  // not measured: the F that runs at the same time also allocates
      o.other_half = &half;
      o.turn = &bound_program::pair;
    }
  }

  operation bind(instruction const& i) {
    operation o{.what = &i};
    runner_->bind(o);
    o.turn = turn_of(i.op.kind);
    if (!o.computes()) return o;
    kind const what = i.op.kind;
    bool const is_measured =
        memory_.watches() && (what == kind::forward || what == kind::recompute || what == kind::backward_input);
    o.compute = is_measured ? &bound_program::compute_measured : &bound_program::compute;
    o.fetch = fetch_of(o);
    if (row_of(i.op.kind).from > 0 && before_backward_ && fetch_first_ == nullptr)
      fetch_first_ = std::exchange(o.fetch, &bound_program::fetch_after_weighing);
    return o;
  }
  operation::method turn_of(kind what) const {
    if (is_own(what)) return &bound_program::simple<&bound_program::own_action>;
    if (runs_backward(what)) return &bound_program::backward;
    if (is_compute(what)) return what == kind::forward ? &bound_program::forward : &bound_program::recompute;
    if (is_send(what)) return &bound_program::simple<&bound_program::send>;
    if (is_receive(what)) return &bound_program::simple<&bound_program::post_receive>;
    if (is_wait(what)) return &bound_program::simple<&bound_program::wait_send>;
    if (what == kind::reduce_gradients) return &bound_program::simple<&bound_program::start_sum>;
    if (what == kind::unshard) return unshard_ ? &bound_program::simple<&bound_program::unshard> : &bound_program::nothing;
    throw std::logic_error(std::string("no method carries out ") + letters_of(what));
  }
  operation::tensor_method fetch_of(operation const& o) const {
    int const from = row_of(o.what->op.kind).from;
    if (from == 0) return &bound_program::fetch_nothing;
    if (o.takes != nullptr) return &bound_program::fetch_from_neighbour;
    if (o.what->source != no_slot) return &bound_program::fetch_from_peer;
    return from < 0 ? &bound_program::fetch_from_batch : &bound_program::fetch_from_loss;
  }

  // Methods that execute an operation.

  void forward(operation const& f) {
    f.slot->lane = 0;
    alone(
        f, [&] { (this->*f.fetch)(f, inputs_); }, inputs_);
  }
  /// Executes R, which needs no gradients: the buffers of its stage's gradients are allocated at the first B or I.
  void recompute(operation const& r) {
    alone(
        r, [] {}, inputs_);
  }
  /// Executes B, I or W.
  void backward(operation const& b) {
    alone(
        b, [&] { prepare_backward(b); }, gradients_of_outputs_);
  }
  template <class Prepare>
  void alone(operation const& o, Prepare const& prepare, tensors& given) {
    std::size_t const entry = record_.add(*o.what);
    record_.guard(*o.what, [&] {
      record_.before(*o.what);
      prepare();
      run(o, given, entry);
      retire(o);
      record_.after(*o.what);
    });
  }

  /// Executes a fused pair whose halves run at the same time.
  void pair(operation const& f) {
    operation const& b = *f.other_half;
    std::size_t const of_f = record_.add(*f.what);
    record_.guard(*f.what, [&] {
      record_.before(*f.what);
      (this->*f.fetch)(f, inputs_);
    });
    std::size_t const of_b = record_.add(*b.what);
    record_.guard(*b.what, [&] {
      record_.before(*b.what);
      prepare_backward(b);
    });
    if (runner_->launches()) {
      for (std::size_t const entry : {of_f, of_b}) record_.starts(entry);
      record_.guard(*f.what, [&] {
        runner_->compute(f, frame_, inputs_);
        runner_->compute(b, frame_, gradients_of_outputs_);
      });
      for (std::size_t const entry : {of_f, of_b}) record_.ends(entry);
    } else {
      runner_->beside(
          f, b, inputs_, [&] { record_.guard(*f.what, [&] { run(f, inputs_, of_f); }); },
          [&] { record_.guard(*b.what, [&] { run(b, gradients_of_outputs_, of_b); }); });
    }
    for (operation const* const half : {&f, &b}) record_.guard(*half->what, [&] { record_.after(*half->what); });
    for (operation const* const half : {&f, &b}) retire(*half);
  }

  /// Executes a send, the post of a receive, a wait for a send, the start of a sum, an UNSHARD, or X, Y or Z, by `Do`.
  template <operation::method Do>
  void simple(operation const& o) {
    std::size_t const entry = record_.add(*o.what);
    record_.guard(*o.what, [&] {
      record_.before(*o.what);
      (this->*Do)(o);
      record_.after(*o.what);
    });
    record_.trace().ends(entry);
  }
  void send(operation const& o) {
    comm_->post_send(o.what->peer, o.what->op, o.what->source, *o.takes);
    o.takes->clear();
  }
  void post_receive(operation const& o) { comm_->post_receive(o.what->peer, o.what->op, o.what->source); }
  void own_action(operation const& o) { runner_->own_action(o, frame_, record_.step()); }
  void wait_send(operation const& o) { comm_->wait_send(o.what->source); }
  void start_sum(operation const& o) {
    if (reduces_ && gradients_ != nullptr) gradients_->start_sums(o.stage());
  }

  void unshard(operation const& o) { unshard_(o.stage()); }
  /// Executes an UNSHARD if all parameters are gathered before a step begins: there is nothing to wait for.
  void nothing(operation const&) {}

  // Parts of a computation's execution.

  void fetch_nothing(operation const&, tensors&) {}
  void fetch_from_batch(operation const& o, tensors& given) {
    given = frame_.batch->inputs(o.micro_batch());
    runner_->bring(o, given);
  }
  void fetch_from_neighbour(operation const& o, tensors& given) {
    given = std::exchange(*o.takes, {});
    runner_->bring(o, given);
  }
  void fetch_from_peer(operation const& o, tensors& given) {
    std::span<at::Tensor> const arrived = comm_->receive(o.what->source);
    given.assign(std::make_move_iterator(arrived.begin()), std::make_move_iterator(arrived.end()));
    runner_->bring(o, given);
  }
  void fetch_from_loss(operation const& o, tensors& given) {
    given.clear();
    if (frame_.batch->counts_nothing(o.micro_batch())) {
      given.emplace_back();
    } else {
      runner_->bring_weight(o, frame_.batch->gradient_weight(o.micro_batch()), given);
    }
  }
  /// Fetches for the rank's first B or I, after `before_backward`, as B and I need the weights of microbatches.
  void fetch_after_weighing(operation const& o, tensors& given) {
    before_backward_();
    (this->*fetch_first_)(o, given);
  }

  void prepare_backward(operation const& b) {
    (this->*b.fetch)(b, gradients_of_outputs_);
    if (gradients_ != nullptr) gradients_->attach(b.stage());
  }
  /// Runs a computation; one half of a pair runs in another thread.
  void run(operation const& o, tensors& given, std::size_t entry) {
    profiler_range const label(o.what->op, record_.slices(), streams_->where().is_cuda());
    record_.starts(entry);
    (this->*o.compute)(o, given);
    record_.ends(entry);
  }
  void compute(operation const& o, tensors& given) { runner_->compute(o, frame_, given); }
  void compute_measured(operation const& f, tensors& given) {
    if (runner_->launches()) return compute(f, given);
    memory_.measure(*f.what, given, *f.slot, [&] { compute(f, given); });
  }
  void retire(operation const& o) {
    runner_->retire(o);
    record_.trace().chunks_change(in_flight_change(o.what->op.kind, plan_.forward_only));
  }

  plan_view plan_;
  transport* comm_;
  gradient_store* gradients_;
  std::function<void()> before_backward_;
  std::function<void(int)> unshard_;
  std::shared_ptr<compute_streams> streams_;
  action_record record_;
  memory_meter memory_;
  std::unique_ptr<stage_runner> runner_;
  std::vector<operation> operations_;
  std::deque<operation> second_halves_;             // of fused pairs; elements keep their addresses
  operation::tensor_method fetch_first_ = nullptr;  // fetches for the first B or I, after `before_backward`

  // Of the current run.
  step_frame frame_;
  bool reduces_ = true;
  tensors inputs_;                // inputs of the current F
  tensors gradients_of_outputs_;  // arguments of the current B or I
};

}  // namespace chevron::detail
