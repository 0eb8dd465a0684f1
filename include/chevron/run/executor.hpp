#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
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
#include <chevron/run/chunk.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/loss.hpp>
#include <chevron/run/micro_batch.hpp>
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
};

/// One rank's interpreter of a program: a loop over its instructions.
///
/// All ranks must run the same program set, with microbatches of the same count, and call `run` alike and in the same order. Each
/// drives its own transport from one thread.
///
/// Who keeps what. An activation slot holds, from F on, the graph of its microbatch (or the inputs, to compute it again) and, until
/// they are sent or taken by the next stage on this rank, the outputs; nothing else: inputs and outputs live on only where the
/// graph saved them. From I on it holds the gradients that W needs; the graph between is gone. A received tensor is moved
/// into the graph. A sent tensor is the transport's from `post_send` to `wait_send`. Stages are the caller's.
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
        losses_(static_cast<std::size_t>(steps.plan.size.micro_batches)),
        outputs_(steps.plan.forward_only ? static_cast<std::size_t>(steps.plan.size.micro_batches) : 0) {
    record_.reserve(static_cast<std::size_t>(steps.length(rank_)));
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
    record_.begin_step(step);
    line_->begin_step(step);
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
    broken_ = false;
  }

  program_view program() const { return program_; }
  record const& last_record() const { return record_; }
  /// The mean loss of each microbatch; undefined tensors on ranks without the last stage, and where there is no loss.
  tensors const& losses() const { return losses_; }
  /// Of a program that only runs forward, without a loss: the last stage's outputs by microbatch, on its rank.
  std::vector<tensors>& outputs() { return outputs_; }

 private:
  struct activation {
    chunk work;
    tensors outputs;
    tensors input_gradients;
  };

  /// Runs the instruction at this position, and gives the position of the next.
  int one(int position, split_batch const& batch, long step) {
    instruction const& i = program_.at(rank_, position);
    recorded& r = record_.add(i.what);
    try {
      carry_out(i, batch, r);
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
    r.end = now_ns();
    return position + 1;
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
  }

  place at_action(instruction const& i, long step) const {
    return {line_->where().global_rank, -1, step, to_text(i.what).str()};
  }

  static std::string thrower(instruction const& i) {
    return is_compute(i.what.what) ? "stage " + std::to_string(i.what.stage) + " threw: " : std::string();
  }

  void carry_out(instruction const& i, split_batch const& batch, recorded& r) {
    switch (i.what.what) {
      case kind::forward: return forward(i, batch, r);
      case kind::backward:
        take_output_gradients(i, batch, r);
        if (hooks_.before_gradients) hooks_.before_gradients(static_cast<int>(i.what.stage));
        slots_[i.slot].work.backward(task_of(i, batch), gradients_, slots_[i.slot].input_gradients);
        record_.chunk_ends();
        break;
      case kind::backward_input:
        take_output_gradients(i, batch, r);
        slots_[i.slot].work.backward_input(task_of(i, batch), gradients_, slots_[i.slot].input_gradients);
        break;
      case kind::backward_weight:
        if (hooks_.before_gradients) hooks_.before_gradients(static_cast<int>(i.what.stage));
        slots_[i.slot].work.backward_weight(task_of(i, batch));
        record_.chunk_ends();
        break;
      case kind::send_forward: send(i, slots_[i.slot].outputs); break;
      case kind::send_backward: send(i, slots_[i.slot].input_gradients); break;
      case kind::receive_forward:
      case kind::receive_backward: line_->post_receive(i.peer, i.what, i.source); break;
      case kind::wait_send_forward:
      case kind::wait_send_backward: line_->wait_send(i.source); break;
      case kind::reduce_gradients:
        if (hooks_.reduce_gradients) hooks_.reduce_gradients(static_cast<int>(i.what.stage));
        break;
      case kind::optimizer_step:
        if (hooks_.optimizer_step) hooks_.optimizer_step();
        break;
    }
    gradients_.clear();
  }

  void send(instruction const& i, tensors& values) {
    line_->post_send(i.peer, i.what, i.source, values);
    values.clear();
  }

  void forward(instruction const& i, split_batch const& batch, recorded& r) {
    int const stage_number = static_cast<int>(i.what.stage);
    int const m = static_cast<int>(i.what.micro_batch);
    bool const training = !program_.plan.forward_only;
    activation& slot = slots_[i.slot];

    if (stage_number == 0) {
      inputs_ = batch.inputs(m);
    } else if (i.local != no_slot) {
      inputs_ = std::move(slots_[i.local].outputs);
      slots_[i.local].outputs.clear();
    } else {
      receive_into(inputs_, i.source);
    }
    r.start = now_ns();

    at::Tensor const loss = slot.work.forward(task_of(i, batch), inputs_, slot.outputs);
    if (training) record_.chunk_starts();

    if (stage_number == program_.plan.stages - 1) {
      losses_[i.what.micro_batch] = loss;
      if (!training && !loss_) {
        outputs_[i.what.micro_batch] = std::move(slot.outputs);
        slot.outputs.clear();
      }
    }
  }

  chunk_task task_of(instruction const& i, split_batch const& batch) {
    int const m = static_cast<int>(i.what.micro_batch);
    auto const stage_number = static_cast<int>(i.what.stage);
    bool const with_loss = stage_number == program_.plan.stages - 1 && loss_;
    return {.owner = &(*stages_)[i.what.stage],
            .around = {.extras = batch.extras(m),
                       .draws = random_place{.seed = hooks_.seed,
                                             .step = record_.step(),
                                             .replica = line_->where().replica(),
                                             .stage = stage_number,
                                             .micro_batch = batch.number(m)}},
            .training = !program_.plan.forward_only,
            .differentiable = stage_number > 0,
            .loss = with_loss ? &loss_ : nullptr,
            .autocast = hooks_.autocast,
            .targets = with_loss ? &batch.targets(m) : nullptr};
  }

  /// Brings the gradients of a stage's outputs: from the loss, from the neighbour on this rank, or from afar.
  void take_output_gradients(instruction const& i, split_batch const& batch, recorded& r) {
    if (static_cast<int>(i.what.stage) == program_.plan.stages - 1) {
      at::Tensor const& loss = losses_[i.what.micro_batch];
      gradients_.push_back(at::full(loss.sizes(), batch.gradient_weight(static_cast<int>(i.what.micro_batch)), loss.options()));
    } else if (i.local != no_slot) {
      gradients_ = std::move(slots_[i.local].input_gradients);
      slots_[i.local].input_gradients.clear();
    } else {
      receive_into(gradients_, i.source);
    }
    r.start = now_ns();
  }

  void receive_into(tensors& out, std::uint16_t receive_slot) {
    std::span<at::Tensor> const arrived = line_->receive(receive_slot);
    out.clear();
    for (at::Tensor& t : arrived) out.push_back(std::move(t));
  }

  program_view program_;
  transport* line_;
  std::vector<stage>* stages_;
  loss_function loss_;
  executor_hooks hooks_;
  int rank_;
  std::vector<activation> slots_;
  tensors losses_;
  std::vector<tensors> outputs_;
  record record_;
  std::optional<speculation> speculation_;
  tensors inputs_, gradients_;  // of the action under way
  bool broken_ = false;
};

}  // namespace chevron
