#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
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
#include <c10/util/Exception.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/captured_step.hpp>
#include <chevron/run/chunk.hpp>
#include <chevron/run/device_clock.hpp>
#include <chevron/run/device_graph.hpp>
#include <chevron/run/device_memory.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/lanes.hpp>
#include <chevron/run/loss.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/profiler_label.hpp>
#include <chevron/run/record.hpp>
#include <chevron/run/speculation.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/transport.hpp>

/// \file
/// Runs one rank's part of a program.

namespace chevron {

/// What the executor hands out while it runs.
struct executor_hooks {
  std::function<void(int stage)> reduce_gradients;  ///< the stage's gradients of this step are complete
  std::function<void()> optimizer_step;             ///< all of this rank's are
  std::function<void(int stage)> before_gradients;  ///< a B or W is about to add to the stage's gradients
  std::uint64_t seed = 0;                           ///< of what stages draw (random.hpp)
  std::optional<at::ScalarType> autocast = {};      ///< stages and loss run under autocast to this
  std::shared_ptr<lanes> on = {};                   ///< what to compute on; empty: the CPU, one thing after the other
  std::shared_ptr<graph_maker> graphs = {};         ///< captures steady runs; empty: none are captured
  std::function<void()> before_capture = {};        ///< parameters' gradients must be where they are when they are added to
};

/// One rank's interpreter of a program: a loop over its instructions.
///
/// All ranks must run the same program set, with microbatches of the same count, and call `run` alike and in the same order. Each
/// drives its own transport from one thread.
///
/// Who keeps what. An activation slot holds, from F on, the graph of its microbatch (or the inputs, to compute it again) and,
/// until they are sent or taken by the next stage on this rank, the outputs; nothing else: inputs and outputs live on only where
/// the graph saved them. From I on it holds the gradients that W needs; the graph between is gone. A received tensor is moved
/// into the graph. A sent tensor is the transport's from `post_send` to `wait_send`. Stages are the caller's.
///
/// Who waits on whom. What is computed, is computed on lane 0 of the rank's lanes (lanes.hpp); of a fused pair the halves run
/// beside each other where there are two, F on the lane that the other half's microbatch did not have in its F: autograd runs a
/// backward where its forward ran. The transport is driven from here alone: what a pair needs is received before it, and sent
/// after.
///
/// Graphs (device_graph.hpp). Where runs repeat themselves (capture_state.hpp), each computation is captured, in the order of the
/// program, before one of them begins; from then on it is launched as a whole. All else goes as it does without: messages are
/// posted and waited for in between, sums are started, the optimizer steps, and a record is kept.
///
/// Failure. A transport's error passes through; whatever a stage or the loss throws becomes a `usage_error` with rank, step
/// and action. After any of them the step is lost and the executor refuses to run again: parameters' gradients are half added up,
/// other ranks are told by whoever owns the transport.
class executor {
 public:
  /// Collective.
  /// \param stages all stages of the model by number; those not on this rank may be empty
  /// \param steps by program: its memory must outlive this
  executor(program_view steps, transport& line, std::vector<stage>& stages, loss_function loss, executor_hooks hooks)
      : program_(steps),
        line_(&line),
        stages_(&stages),
        loss_(std::move(loss)),
        hooks_(std::move(hooks)),
        rank_(line.where().pipeline_rank()),
        slots_(static_cast<std::size_t>(steps.slots[line.where().pipeline_rank()].activation)),
        on_(hooks_.on ? hooks_.on : std::make_shared<lanes>(at::kCPU, false)),
        clock_(on_->where()),
        memory_(steps.plan.forward_only ? at::Device(at::kCPU) : on_->where()),
        kept_(static_cast<std::size_t>(steps.plan.stages)),
        losses_(static_cast<std::size_t>(steps.plan.size.micro_batches)),
        outputs_(steps.plan.forward_only ? static_cast<std::size_t>(steps.plan.size.micro_batches) : 0) {
    record_.reserve(static_cast<std::size_t>(steps.length(rank_)));
    if (hooks_.graphs)
      captured_ = std::make_unique<captured_step>(hooks_.graphs, on_, static_cast<std::size_t>(steps.length(rank_)));
    line.connect(edges_of(steps));
  }

  /// Tells the transport how many slots this program uses: once, and again after another program used it.
  /// \param more slots for what the caller sends besides; they stand behind the program's
  void open(slot_counts more = {}) {
    slot_counts const own = slots();
    line_->open({own.activation, own.receive + more.receive, own.send + more.send});
  }
  slot_counts slots() const { return program_.slots[rank_]; }

  /// Runs the program once over these microbatches.
  /// \param verdict if given, the parameters may yet be taken back: asked once, at the end of what may run before that is known
  /// (speculation.hpp), whether they stand. If not, what was done so far is withdrawn, and the step starts over. Given on all
  /// ranks or on none, with the same answer.
  void run(split_batch const& batch, long step, std::function<bool()> const& verdict = {}) {
    if (broken_) throw usage_error("an earlier step failed on this rank: nothing can be run after it", at_action({}, step));
    broken_ = true;
    lanes::scope const here(*on_);
    record_.begin_step(step);
    clock_.begin_step();
    memory_.begin_step();
    line_->begin_step(step);
    launching_ = captured_ && prepare(batch, step);
    int const length = program_.length(rank_);
    int next = 0;
    if (verdict) {
      if (!speculation_) speculation_ = speculation_of(program_, rank_);
      auto const& later = speculation_->after_verdict;
      while (next < speculation_->end) next = later[static_cast<std::size_t>(next)] ? next + 1 : one(next, batch, step);
      if (verdict()) {
        for (int i = 0; i < speculation_->end; ++i) {
          if (later[static_cast<std::size_t>(i)]) one(i, batch, step);
        }
      } else {
        withdraw(*speculation_);
        next = 0;
      }
    }
    while (next < length) next = one(next, batch, step);
    note_memory();
    broken_ = false;
  }

  program_view program() const { return program_; }
  record const& last_record() const { return record_; }
  /// The same with the times of an accelerator, which it waits for.
  record const& settle_record() {
    clock_.settle(record_);
    return record_;
  }
  /// Why the last run's computations were not launched as graphs; empty where they were.
  std::string why_not_launched() const { return captured_ ? captured_->state().why_not() : "no graphs were asked for"; }
  /// The mean loss of each microbatch; undefined tensors on ranks without the last stage, and where there is no loss.
  tensors const& losses() const { return losses_; }
  /// Of a program that only runs forward, without a loss: the last stage's outputs by microbatch, on its rank.
  std::vector<tensors>& outputs() { return outputs_; }

 private:
  struct activation {
    chunk work;
    int lane = 0;       // that its F ran on
    bool drew = false;  // random numbers, in its F
    at::Tensor loss;    // of the last stage's F, until it is noted
    tensors outputs;
    tensors input_gradients;
  };

  /// Runs the instruction at this position, and gives the position of the next.
  int one(int position, split_batch const& batch, long step) {
    instruction const& i = program_.at(rank_, position);
    if (i.what.fused != 0 && on_->two()) return pair(position, batch, step);
    std::size_t const entry = record_.add(i.what);
    guarded(i, step, [&] { carry_out(i, batch, entry); });
    if (!is_compute(i.what.what)) record_.ends(entry);
    return position + 1;
  }

  /// Runs the two halves of a fused pair beside each other.
  int pair(int position, split_batch const& batch, long step) {
    instruction const& f = program_.at(rank_, position);
    instruction const& b = program_.at(rank_, position + 1);
    std::size_t const of_f = record_.add(f.what);
    guarded(f, step, [&] { bring_inputs(f, batch); });
    std::size_t const of_b = record_.add(b.what);
    guarded(b, step, [&] {
      bring_output_gradients(b, batch);
      attach(b);
    });
    if (launching_) {
      for (std::size_t const entry : {of_f, of_b}) begins(entry);
      guarded(f, step, [&] { launch(f); });
      give(b);
      for (std::size_t const entry : {of_f, of_b}) ends(entry);
    } else {
      beside(
          f, b, [&] { guarded(f, step, [&] { compute(f, batch, of_f); }); },
          [&] { guarded(b, step, [&] { compute(b, batch, of_b); }); });
    }
    note(f);
    note(b);
    return position + 2;
  }

  /// The two halves' work on the two lanes.
  template <class First, class Second>
  void beside(instruction const& f, instruction const& b, First const& first, Second const& second) {
    int const lane = 1 - slots_[b.slot].lane;
    slots_[f.slot].lane = lane;
    // The other lane must not get their memory while F still reads it.
    tensors const inputs_of_f = inputs_;
    on_->both(lane, first, second);
  }

  std::size_t position_of(instruction const& i) const { return static_cast<std::size_t>(&i - &program_.at(rank_, 0)); }

  /// Decides how this run goes, and sees to what it needs for that.
  /// \returns whether computations are launched
  bool prepare(split_batch const& batch, long step) {
    run_signature now;
    batch.append_shapes(now.shapes);
    for (stage const& s : *stages_) {
      for (auto const* list : {&s.parameters(), &s.buffers()}) {
        for (parameter const& p : *list) now.memory.push_back(p.value.defined() ? p.value.const_data_ptr() : nullptr);
      }
    }
    run_mode const mode = captured_->state().next(std::move(now));
    if (mode == run_mode::one_by_one || (mode == run_mode::capture && !rehearse(batch, step))) return false;
    captured_->take(batch);
    return true;
  }

  /// Captures every computation of the program. Nothing is computed, and other ranks notice nothing: where a message would be
  /// received there is room for it, and what would be sent is kept until it would have gone.
  /// \returns whether it could be done
  bool rehearse(split_batch const& live, long step) {
    capturing_ = true;
    std::vector<tensors> sending(static_cast<std::size_t>(slots().send));
    bool done = true;
    try {
      if (hooks_.before_capture) hooks_.before_capture();
      split_batch const batch = captured_->begin(live, static_cast<bool>(stages_->back()));
      for (int next = 0; next < program_.length(rank_);) {
        instruction const& i = program_.at(rank_, next);
        if (is_compute(i.what.what)) {
          guarded(i, step, [&] { next = capture(next, batch); });
          continue;
        }
        if (i.what.what == kind::send_forward) sending[i.source] = std::move(slots_[i.slot].outputs);
        if (i.what.what == kind::send_backward) sending[i.source] = std::move(slots_[i.slot].input_gradients);
        if (i.what.what == kind::wait_send_forward || i.what.what == kind::wait_send_backward) sending[i.source].clear();
        ++next;
      }
      captured_->state().captured();
    } catch (std::exception const& e) {
      captured_->clear();
      captured_->state().failed(detail::first_line(e.what()));
      done = false;
    }
    for (activation& slot : slots_) slot = {};
    for (at::Tensor& loss : losses_) loss = at::Tensor();
    inputs_.clear();
    gradients_.clear();
    captured_bytes_ = done ? memory_.peak(0).active : 0;
    capturing_ = false;
    return done;
  }

  /// Captures the computation at this position, or a fused pair, and gives the position of the next.
  int capture(int position, split_batch const& batch) {
    instruction const& i = program_.at(rank_, position);
    captured_computation& c = captured_->of(static_cast<std::size_t>(position));
    bool const fused = i.what.fused != 0 && on_->two();
    if (!fused) {
      attach(i);
      captured_->capture(c, [&] {
        make_room(i, batch);
        if (i.what.what == kind::forward) slots_[i.slot].lane = 0;
        work(i, batch);
      });
      keep(i);
      return position + 1;
    }
    instruction const& b = program_.at(rank_, position + 1);
    attach(b);
    captured_->capture(c, [&] {
      make_room(i, batch);
      make_room(b, batch);
      beside(
          i, b, [&] { work(i, batch); }, [&] { work(b, batch); });
    });
    keep(i);
    keep(b);
    return position + 2;
  }

  /// Within a capture: memory for what will come from outside, or what the computation before left on this rank.
  void make_room(instruction const& i, split_batch const& batch) {
    captured_computation& c = captured_->of(position_of(i));
    auto const from_outside = [&](tensors& into, tensors const& like) {
      for (at::Tensor const& one : like) into.push_back(detail::room_for(detail::outline_of(one), on_->where()));
      for (at::Tensor const& made : into) c.arriving.push_back(detail::place_of(made));
    };
    bool const last = static_cast<int>(i.what.stage) == program_.plan.stages - 1;
    if (i.what.what == kind::forward) {
      inputs_.clear();
      if (i.what.stage > 0 && i.local != no_slot) {
        inputs_ = std::move(slots_[i.local].outputs);
      } else {
        from_outside(inputs_, i.what.stage == 0 ? batch.inputs(static_cast<int>(i.what.micro_batch)) : c.seen);
      }
    } else if (i.what.what != kind::backward_weight) {
      gradients_.clear();
      if (!last && i.local != no_slot) {
        gradients_ = std::move(slots_[i.local].input_gradients);
      } else {
        from_outside(gradients_, last ? tensors{losses_[i.what.micro_batch]} : c.seen);
      }
    }
  }

  /// After a capture: what others will look for.
  void keep(instruction const& i) {
    captured_computation& c = captured_->of(position_of(i));
    activation& slot = slots_[i.slot];
    auto const s = static_cast<int>(i.what.stage);
    plan_view const& plan = program_.plan;
    auto const elsewhere = [&](int other) { return other >= 0 && other < plan.stages && plan.rank_of_stage(other) != rank_; };
    if (i.what.what == kind::forward) {
      if (s == plan.stages - 1) c.loss = losses_[i.what.micro_batch] = std::exchange(slot.loss, {});
      if (elsewhere(s + 1)) {
        for (at::Tensor const& t : slot.outputs) c.departing.push_back(detail::place_of(t));
      }
    } else if (i.what.what != kind::backward_weight && elsewhere(s - 1)) {
      for (at::Tensor const& t : slot.input_gradients) c.departing.push_back(detail::place_of(t));
    }
  }

  void launch(instruction const& i) {
    captured_->of(position_of(i)).graph->launch();
    give(i);
  }
  /// What a launched computation leaves, to where it would have left it.
  void give(instruction const& i) {
    captured_computation const& c = captured_->of(position_of(i));
    activation& slot = slots_[i.slot];
    slot.loss = c.loss;
    tensors& out = i.what.what == kind::forward ? slot.outputs : slot.input_gradients;
    out.clear();
    for (at::Tensor const& t : c.departing) out.push_back(line_->hands_over() && t.defined() ? t.clone() : t);
  }

  template <class Work>
  void guarded(instruction const& i, long step, Work const& work) const {
    try {
      work();
    } catch (usage_error const& e) {
      if (e.where().rank >= 0) throw;
      throw usage_error(thrower(i) + e.what(), at_action(i, step));
    } catch (error const&) {
      throw;
    } catch (c10::Error const& e) {
      throw usage_error(thrower(i) + e.what_without_backtrace(), at_action(i, step));
    } catch (std::exception const& e) {
      throw usage_error(thrower(i) + e.what(), at_action(i, step));
    }
  }

  /// Lets go of all that was computed, and takes what others sent meanwhile off the channels: a message is received before
  /// the next of its edge is posted, so that slots are used as the program uses them.
  void withdraw(speculation const& what) {
    for (int const position : what.unread) {
      instruction const& i = program_.at(rank_, position);
      if (position >= what.end) line_->post_receive(i.peer, i.what, i.source);
      line_->receive(i.source);
    }
    for (int const position : what.sending) line_->wait_send(program_.at(rank_, position).source);
    for (activation& slot : slots_) slot = {};
    record_.start_over();
    clock_.start_over();
  }

  place at_action(instruction const& i, long step) const { return {line_->where().global_rank, -1, step, to_text(i.what).str()}; }

  static std::string thrower(instruction const& i) {
    return is_compute(i.what.what) ? "stage " + std::to_string(i.what.stage) + " threw: " : std::string();
  }

  void carry_out(instruction const& i, split_batch const& batch, std::size_t entry) {
    switch (i.what.what) {
      case kind::forward:
        bring_inputs(i, batch);
        slots_[i.slot].lane = 0;
        return carry_out_computation(i, batch, entry);
      case kind::backward:
      case kind::backward_input:
        bring_output_gradients(i, batch);
        attach(i);
        return carry_out_computation(i, batch, entry);
      case kind::backward_weight:
        attach(i);
        return carry_out_computation(i, batch, entry);
      case kind::send_forward:
        return send(i, slots_[i.slot].outputs);
      case kind::send_backward:
        return send(i, slots_[i.slot].input_gradients);
      case kind::receive_forward:
      case kind::receive_backward:
        return line_->post_receive(i.peer, i.what, i.source);
      case kind::wait_send_forward:
      case kind::wait_send_backward:
        return line_->wait_send(i.source);
      case kind::reduce_gradients:
        if (hooks_.reduce_gradients) hooks_.reduce_gradients(static_cast<int>(i.what.stage));
        return;
      case kind::optimizer_step:
        if (hooks_.optimizer_step) hooks_.optimizer_step();
        return;
    }
  }

  void attach(instruction const& i) {
    bool const adds = i.what.what == kind::backward || i.what.what == kind::backward_weight;
    if (adds && hooks_.before_gradients) hooks_.before_gradients(static_cast<int>(i.what.stage));
  }

  void carry_out_computation(instruction const& i, split_batch const& batch, std::size_t entry) {
    compute(i, batch, entry);
    note(i);
  }

  /// F, B, I or W alone: what it needs has been brought. Of a pair, one of these runs in another thread.
  void compute(instruction const& i, split_batch const& batch, std::size_t entry) {
    profiler_label const label(i.what, on_->where().is_cuda());
    begins(entry);
    launching_ ? launch(i) : memory_.watches() && i.what.what == kind::forward ? weighed(i, batch) : work(i, batch);
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

  void work(instruction const& i, split_batch const& batch) {
    activation& slot = slots_[i.slot];
    chunk_task const task = task_of(i, batch);
    switch (i.what.what) {
      case kind::forward:
        slot.loss = slot.work.forward(task, inputs_, slot.outputs);
        break;
      case kind::backward:
        slot.work.backward(task, gradients_, slot.input_gradients);
        break;
      case kind::backward_input:
        slot.work.backward_input(task, gradients_, slot.input_gradients);
        break;
      default:
        slot.work.backward_weight(task);
    }
    if (i.what.what != kind::forward) gradients_.clear();
  }

  /// F, and what it keeps: what is in use after it and was not before, and what came for it. Not its outputs, where nothing but
  /// their way to the next stage holds them.
  void weighed(instruction const& i, split_batch const& batch) {
    std::int64_t before = memory_.in_use();
    bool const came = i.what.stage > 0 && i.local == no_slot;
    for (at::Tensor const& t : inputs_) before -= came && t.defined() ? static_cast<std::int64_t>(t.storage().nbytes()) : 0;
    work(i, batch);
    std::int64_t kept = memory_.in_use() - before;
    for (at::Tensor const& t : slots_[i.slot].outputs) {
      if (t.defined() && t.storage().use_count() == 1) kept -= static_cast<std::int64_t>(t.storage().nbytes());
    }
    kept_[i.what.stage] = std::max(kept_[i.what.stage], kept);
  }

  void note_memory() {
    if (!memory_.watches()) return;
    device_memory_use use = memory_.peak(peak_bytes(program_.plan, size_view{kept_.data(), nullptr, 1}, rank_));
    // Graphs ask the allocator for nothing: what they use it saw when they were captured.
    if (launching_) use.active = std::max(use.active, captured_bytes_);
    record_.took(use);
  }

  /// What a computation that is done means for others.
  void note(instruction const& i) {
    bool const training = !program_.plan.forward_only;
    if (i.what.what != kind::forward) {
      if (i.what.what != kind::backward_input) record_.chunk_ends();
      return;
    }
    activation& slot = slots_[i.slot];
    if (std::exchange(slot.drew, false)) captured_->state().drew(static_cast<int>(i.what.stage));
    if (training) record_.chunk_starts();
    if (static_cast<int>(i.what.stage) < program_.plan.stages - 1) return;
    losses_[i.what.micro_batch] = std::move(slot.loss);
    slot.loss = at::Tensor();
    if (!training && !loss_) {
      outputs_[i.what.micro_batch] = std::move(slot.outputs);
      slot.outputs.clear();
    }
  }

  void send(instruction const& i, tensors& values) {
    line_->post_send(i.peer, i.what, i.source, values);
    values.clear();
  }

  /// Brings a stage's inputs: from the batch, from the neighbour on this rank, or from afar.
  void bring_inputs(instruction const& i, split_batch const& batch) {
    if (i.what.stage == 0) {
      inputs_ = batch.inputs(static_cast<int>(i.what.micro_batch));
    } else if (i.local != no_slot) {
      inputs_ = std::move(slots_[i.local].outputs);
      slots_[i.local].outputs.clear();
    } else {
      receive_into(inputs_, i);
    }
    if (launching_) captured_->of(position_of(i)).take(inputs_);
  }

  chunk_task task_of(instruction const& i, split_batch const& batch) {
    int const m = static_cast<int>(i.what.micro_batch);
    auto const stage_number = static_cast<int>(i.what.stage);
    bool const with_loss = stage_number == program_.plan.stages - 1 && loss_;
    std::optional<random_place> draws;  // of what is captured nothing draws
    if (!capturing_) {
      draws = {.seed = hooks_.seed,
               .step = record_.step(),
               .replica = line_->where().replica(),
               .stage = stage_number,
               .micro_batch = batch.number(m)};
    }
    return {.owner = &(*stages_)[i.what.stage],
            .around = {.extras = batch.extras(m), .draws = draws, .drew = captured_ ? &slots_[i.slot].drew : nullptr},
            .training = !program_.plan.forward_only,
            .differentiable = stage_number > 0,
            .loss = with_loss ? &loss_ : nullptr,
            .autocast = hooks_.autocast,
            .targets = with_loss ? &batch.targets(m) : nullptr};
  }

  /// Brings the gradients of a stage's outputs: from the loss, from the neighbour on this rank, or from afar.
  void bring_output_gradients(instruction const& i, split_batch const& batch) {
    if (static_cast<int>(i.what.stage) == program_.plan.stages - 1) {
      double const weight = batch.gradient_weight(static_cast<int>(i.what.micro_batch));
      if (launching_) {
        at::Tensor(captured_->of(position_of(i)).arriving.front()).fill_(weight);
        return;
      }
      at::Tensor const& loss = losses_[i.what.micro_batch];
      gradients_.push_back(at::full(loss.sizes(), weight, loss.options()));
    } else if (i.local != no_slot) {
      gradients_ = std::move(slots_[i.local].input_gradients);
      slots_[i.local].input_gradients.clear();
    } else {
      receive_into(gradients_, i);
    }
    if (launching_) captured_->of(position_of(i)).take(gradients_);
  }

  void receive_into(tensors& out, instruction const& i) {
    std::span<at::Tensor> const arrived = line_->receive(i.source);
    out.clear();
    for (at::Tensor& t : arrived) out.push_back(std::move(t));
    if (!captured_ || launching_) return;
    tensors& seen = captured_->of(position_of(i)).seen;
    seen.clear();
    for (at::Tensor const& t : out) seen.push_back(detail::outline_of(t));
  }

  program_view program_;
  transport* line_;
  std::vector<stage>* stages_;
  loss_function loss_;
  executor_hooks hooks_;
  int rank_;
  std::vector<activation> slots_;
  std::shared_ptr<lanes> on_;
  device_clock clock_;
  device_memory memory_;
  std::vector<std::int64_t> kept_;  // bytes that a microbatch keeps, by stage
  std::unique_ptr<captured_step> captured_;
  bool capturing_ = false;           // under way
  bool launching_ = false;           // in this run
  std::int64_t captured_bytes_ = 0;  // in use at one time when the program was captured
  tensors losses_;
  std::vector<tensors> outputs_;
  record record_;
  std::optional<speculation> speculation_;
  tensors inputs_, gradients_;  // of the action under way
  bool broken_ = false;
};

}  // namespace chevron
