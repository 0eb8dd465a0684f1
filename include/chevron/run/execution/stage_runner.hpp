#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/execution/activation_meter.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/own_work.hpp>
#include <chevron/run/model/random_scope.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/model/stage_execution.hpp>

/// \file
/// What a rank computes, whoever asks for it: the executor, or a capture of its program.

namespace chevron {

/// What a slot holds: from F on the graph of its microbatch (or the inputs, to compute it again) and, until they are sent or
/// taken by the next stage on this rank, the outputs; nothing else: inputs and outputs live on only where the graph saved them.
/// From I on it holds the gradients that W needs; the graph between is gone.
struct activation {
  stage_execution work;
  int lane = 0;       // that its F ran on
  bool drew = false;  // random numbers, in the F, B, I or W under way
  at::Tensor loss;    // of the last stage's F, until it is noted
  tensors outputs;
  tensors input_gradients;
};

/// One rank's activations, and F, B, I, W and R on them.
///
/// What is computed, is computed on the main stream of the rank's compute streams (compute_streams.hpp); of a fused pair the
/// halves run beside each other where there are two, F on the lane that the other half's microbatch did not have in its F:
/// autograd runs a backward where its forward ran.
class stage_runner {
 public:
  /// What stages and loss compute with, besides what goes through the pipeline.
  struct settings {
    std::uint64_t seed = 0;  ///< of what they draw (random_scope.hpp)
    int replica = 0;
    std::optional<at::ScalarType> autocast = {};
    int lowest_trained = 0;  ///< the first stage with a parameter that needs a gradient
    own_handler own = {};    ///< runs X, Y and Z
  };

  stage_runner(program_view steps, int rank, std::vector<stage>& stages, loss_function loss, settings with,
               std::shared_ptr<compute_streams> streams)
      : plan_(steps.plan),
        stages_(&stages),
        loss_(std::move(loss)),
        with_(with),
        streams_(std::move(streams)),
        slots_(static_cast<std::size_t>(steps.slots[rank].activation)),
        losses_(static_cast<std::size_t>(steps.plan.size.micro_batches)) {
    for (int i = steps.begin[rank]; i < steps.begin[rank + 1]; ++i) {
      action const a = steps.instructions[i].op;
      if (a.kind == kind::recompute) check_recomputes((*stages_)[a.stage], a);
      if (is_own(a.kind) && !with_.own) {
        throw usage_error("the schedule has " + to_text(a).str() +
                          ", but nothing is said to run for it. Remedy: give trainer_options::own_actions");
      }
    }
  }

  compute_streams& streams() const { return *streams_; }
  std::vector<stage> const& stages() const { return *stages_; }
  bool has_loss() const { return static_cast<bool>(loss_); }
  bool is_last(instruction const& i) const { return static_cast<int>(i.op.stage) == plan_.stages - 1; }

  activation& of(instruction const& i) { return slots_[i.slot]; }
  /// Of the stage that hands this one its inputs or gradients on this rank.
  activation& neighbour_of(instruction const& i) { return slots_[i.local]; }
  /// The mean loss of each microbatch.
  tensors& losses() { return losses_; }
  tensors const& losses() const { return losses_; }

  /// F, B, I, W or R.
  /// \param step  from which random numbers come, or none: then nothing is to draw from numbers of the step
  /// \param given F: the stage's inputs; B and I: the gradients of its outputs; W and R: nothing. Empty afterwards
  void compute(instruction const& i, split_batch const& batch, std::optional<long> step, tensors& given) {
    activation& slot = of(i);
    stage_task task = task_of(i, batch, step);
    auto const run = [&] {
      switch (i.op.kind) {
        case kind::forward:
          slot.loss = slot.work.forward(task, given, slot.outputs);
          break;
        case kind::backward:
          slot.work.backward(task, given, slot.input_gradients);
          break;
        case kind::backward_input:
          slot.work.backward_input(task, given, slot.input_gradients);
          break;
        case kind::recompute:
          slot.work.recompute(task);
          break;
        default:
          slot.work.backward_weight(task);
      }
      given.clear();
    };
    meter_ == nullptr ? run() : meter_->measure(i.op, task, slot.work, given, slot.outputs, run);
  }

  /// X, Y or Z.
  void own_action(instruction const& i, long step) {
    at::NoGradGuard const no_graph;
    with_.own({letters_of(i.op.kind)[0], static_cast<int>(i.op.stage), static_cast<int>(i.op.micro_batch), step,
               (*stages_)[i.op.stage]});
  }

  /// W, of work that was taken out of its slot.
  void backward_weight(instruction const& w, stage_execution& work, split_batch const& batch, std::optional<long> step) {
    stage_task task = task_of(w, batch, step);
    tensors none;
    auto const run = [&] { work.backward_weight(task); };
    meter_ == nullptr ? run() : meter_->measure(w.op, task, work, none, none, run);
  }

  /// From here on it counts what is computed; null: nothing is counted.
  void measured_by(activation_meter* meter) { meter_ = meter; }

  /// The work of a fused pair's halves, on the two lanes.
  /// \param inputs of F: the other lane must not get their memory while F still reads it
  template <class Forward, class Backward>
  void beside(instruction const& f, instruction const& b, tensors const& inputs, Forward const& forward,
              Backward const& backward) {
    int const lane = 1 - of(b).lane;
    of(f).lane = lane;
    tensors const held = inputs;
    streams_->both(lane, forward, backward);
  }

  /// Lets go of all microbatches under way.
  void drop() {
    for (activation& slot : slots_) slot = {};
  }

 private:
  /// \throws usage_error for a stage that an R would not run again: its activations would stay from F on, not from R on
  static void check_recomputes(stage const& owner, action r) {
    for (std::size_t part = 0; part < owner.parts(); ++part) {
      if (owner.recomputes(part)) return;
    }
    throw usage_error("the schedule has " + to_text(r).str() + ", but stage " + std::to_string(r.stage) +
                      " recomputes nothing. Remedy: call recompute() on the stage that is built, or take a schedule without R");
  }

  stage_task task_of(instruction const& i, split_batch const& batch, std::optional<long> step) {
    int const m = static_cast<int>(i.op.micro_batch);
    auto const stage_number = static_cast<int>(i.op.stage);
    bool const with_loss = is_last(i) && loss_;
    std::optional<rng_key> draws;
    if (step) {
      draws = {
          .seed = with_.seed, .step = *step, .replica = with_.replica, .stage = stage_number, .micro_batch = batch.number(m)};
    }
    return {.owner = &(*stages_)[i.op.stage],
            .around = {.side_inputs = batch.side_inputs(m),
                       .draws = draws,
                       .drew = &of(i).drew,
                       .evaluation = plan_.forward_only,
                       .loss_weight = &batch.gradient_weight(m)},
            .training = !plan_.forward_only,
            .differentiable = stage_number > with_.lowest_trained,
            .untrained = stage_number < with_.lowest_trained,
            .loss = with_loss ? &loss_ : nullptr,
            .autocast = with_.autocast,
            .targets = with_loss ? &batch.targets(m) : nullptr};
  }

  plan_view plan_;
  std::vector<stage>* stages_;
  loss_function loss_;
  settings with_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<activation> slots_;
  tensors losses_;
  activation_meter* meter_ = nullptr;
};

}  // namespace chevron
