#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/shard_watch.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/joint_calls.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/execute/activation_meter.hpp>
#include <chevron/run/execute/carry_store.hpp>
#include <chevron/run/execute/executor_settings.hpp>
#include <chevron/run/execute/operation.hpp>
#include <chevron/run/execute/slice_agreement.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/own_work.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_execution.hpp>

/// \file
/// Runs F, B, I, W and R in a rank's activation slots.

namespace chevron::detail {

/// The batch and step that a computation belongs to.
struct step_frame {
  split_batch const* batch = nullptr;
  std::optional<long> step = {};  ///< selects random numbers; empty in a capture, where stages must not draw
  tensors* seeds = nullptr;       ///< in a capture: gets the graph's memory for gradients of declared losses; else null
};

/// Owns one rank's activation slots, and runs computations in them, kernel by kernel.
///
/// Computations run on the main stream of the rank's compute streams (compute_streams.hpp). With two streams the halves of a
/// fused pair run at the same time: autograd runs B or I on the lane on which the microbatch's F ran, so the pair's F runs on
/// the other lane.
class stage_runner {
 public:
  stage_runner(program_view const& steps, topology const& where, std::vector<stage>& stages, loss_function loss,
               executor_settings const& settings, std::shared_ptr<compute_streams> streams)
      : plan_(steps.plan),
        stages_(&stages),
        loss_(std::move(loss)),
        seed_(settings.seed),
        replica_(where.replica()),
        autocast_(settings.autocast),
        lowest_trained_(settings.lowest_trained),
        joint_(joint_calls(where).over_replicas()),
        own_(settings.own_actions),
        streams_(std::move(streams)),
        slots_(static_cast<std::size_t>(steps.slots[where.pipeline_rank()].activation)),
        losses_(static_cast<std::size_t>(plan_.size.units())),
        stage_losses_(losses_.size() * stages.size()),
        outputs_(plan_.forward_only ? losses_.size() : 0),
        watch_(settings.watch) {
    if (plan_.size.slices > 1) {
      carries_.emplace(plan_, stages);
      slices_.emplace(stages);
    }
    std::size_t next = 0;
    for (stage const& one : stages) {
      first_losses_.push_back(next);
      next += one.losses().size();
    }
  }
  stage_runner(stage_runner const&) = delete;
  stage_runner& operator=(stage_runner const&) = delete;

  compute_streams& streams() const { return *streams_; }
  std::vector<stage> const& stages() const { return *stages_; }
  /// The index of a stage's first loss among the rank's losses.
  std::size_t first_loss(int stage) const { return first_losses_[static_cast<std::size_t>(stage)]; }
  /// The mean loss of each microbatch.
  tensors& losses() { return losses_; }
  /// The values of a stage's declared losses, of one microbatch.
  tensors const& stage_losses(int stage, int micro_batch) const { return stage_losses_[place_of(stage, micro_batch)]; }
  /// The last stage's outputs by microbatch, if the program only runs forward, without a loss.
  std::vector<tensors>& outputs() { return outputs_; }

  /// Sets the addresses of an instruction's slots in `o`.
  void bind(operation& o) {
    instruction const& i = *o.what;
    check_runs(i.op);
    if (i.slot == no_slot) return;
    kind_row const& row = row_of(i.op.kind);
    o.slot = &slots_[i.slot];
    tensors* const result = row.to == 0 ? nullptr : &o.slot->result(row.to);
    if (!o.computes()) {
      o.takes = result;
      return;
    }
    o.gives = result;
    if (i.local != no_slot) o.takes = &slots_[i.local].result(-row.from);
    o.gives_loss = row.to > 0 && o.stage() == plan_.stages - 1;
  }

  /// The gradient of a microbatch's loss, for the last stage's B or I.
  /// \param weight the loss's weight times the factor of loss scaling
  at::Tensor loss_gradient(operation const& o, double weight) const {
    at::Tensor const& loss = losses_[o.what->op.micro_batch];
    return at::full(loss.sizes(), weight, loss.options());
  }

  /// Runs F, B, I, W or R, and clears `given`.
  /// \param given F: the stage's inputs; B and I: the gradients of the stage's outputs; W and R: empty
  void compute(operation const& o, step_frame const& frame, tensors& given) {
    stage_call task = task_of(o, frame);
    if (meter_ && frame.step) {  // a capture is not measured
      meter_->measure(o.what->op, task, o.slot->work, given, o.slot->outputs, [&] { run(o, task, given); });
    } else {
      run(o, task, given);
    }
  }

  /// Runs X, Y or Z.
  void own_action(operation const& o, step_frame const& frame, long step) {
    at::NoGradGuard const no_graph;
    char const letter = letters_of(o.what->op.kind)[0];
    tensors near;
    if (streams_->on_accelerator()) near.push_back(at::empty({0}, streams_->where()));
    random_scope const draws({.seed = seed_,
                              .step = step,
                              .replica = replica_,
                              .stage = o.stage(),
                              .micro_batch = frame.batch->number(o.micro_batch()),
                              .use = random_use::own_action,
                              .node = static_cast<std::uint64_t>(letter)},
                             near);
    own_({letter, o.stage(), o.micro_batch(), step, (*stages_)[o.what->op.stage]});
    static_cast<void>(draws.drew());  // refuses a generator that ranks share
  }

  /// Moves losses, and outputs for the caller, out of the slot. Called after a computation, or after both halves of a pair.
  void retire(operation const& o) {
    if (!o.slot->losses.empty()) stage_losses_[place_of(o.stage(), o.micro_batch())] = std::exchange(o.slot->losses, {});
    if (!o.gives_loss) return;
    losses_[o.what->op.micro_batch] = std::exchange(o.slot->loss, {});
    if (plan_.forward_only && !loss_) outputs_[o.what->op.micro_batch] = std::exchange(o.slot->outputs, {});
  }

  /// Runs the halves of a fused pair at the same time, on two lanes.
  /// \param inputs F's inputs, not freed until both halves end: the backward's lane must not reuse memory that F still reads
  template <class Forward, class Backward>
  void beside(operation const& f, operation const& b, tensors const& inputs, Forward const& forward, Backward const& backward) {
    int const lane = 1 - b.slot->lane;
    f.slot->lane = lane;
    tensors const held = inputs;
    tensors const carried = carries_ ? carries_->held(f.what->op) : tensors();
    tensors const gradients = carries_ ? carries_->held(b.what->op) : tensors();
    streams_->both(lane, forward, backward);
  }

  /// In the next run, measures the bytes that stages store for a microbatch (activation_meter.hpp).
  void measure_bytes() {
    if (!plan_.forward_only) meter_.emplace(plan_);
  }
  /// The measured bytes by stage, returned once after a measured run.
  std::optional<std::vector<measured_bytes>> take_measured_bytes() {
    if (!meter_) return {};
    return std::exchange(meter_, {})->found();
  }

  /// After the first run of a program with slices: compares slices with their sequence (slice_agreement.hpp). Collective.
  void compare_slices(transport& comm, step_frame const& frame) {
    if (!slices_) return;
    slices_->check(comm, *stages_, *frame.batch,
                   {{.seed = seed_, .step = frame.step.value_or(0), .replica = replica_}, autocast_});
    slices_.reset();
  }

  /// Drops all unfinished microbatches.
  void drop() {
    for (activation& slot : slots_) slot = {};
    if (carries_) carries_->clear();
  }

 private:
  /// \throws usage_error for X, Y or Z without `own_actions`, and for an R whose stage recomputes nothing
  void check_runs(action a) const {
    if (is_own(a.kind) && !own_) {
      throw usage_error("the schedule has " + to_text(a, plan_.size.slices).str() +
                        ", and trainer_options::own_actions is empty. Remedy: a function for the X, Y and Z of this schedule");
    }
    if (a.kind != kind::recompute) return;
    if ((*stages_)[a.stage].recomputes()) return;
    throw usage_error("the schedule has " + to_text(a, plan_.size.slices).str() + ", but stage " + std::to_string(a.stage) +
                      " recomputes nothing. Remedy: call recompute() on the stage that is built, or take a schedule without R");
  }

  /// Runs a computation, and clears `given`.
  void run(operation const& o, stage_call const& task, tensors& given) {
    if (task.watch != nullptr) watch_before(o, task, given);
    stage_execution& work = o.slot->work;
    switch (o.what->op.kind) {
      case kind::forward:
        o.slot->loss = work.forward(task, given, o.slot->outputs);
        break;
      case kind::backward:
        work.backward(task, given, o.slot->input_gradients);
        break;
      case kind::backward_input:
        work.backward_input(task, given, o.slot->input_gradients);
        break;
      case kind::backward_weight:
        work.backward_weight(task);
        break;
      case kind::recompute:
        work.recompute(task);
        break;
      default:
        break;
    }
    if (task.watch != nullptr) watch_after(o, task);
    if (carries_) carries_->end(o.what->op);
    given.clear();
  }

  /// Records the tensors that an F takes from the stage and the slice before, for the comparison over shards.
  void watch_before(operation const& o, stage_call const& task, tensors const& given) {
    watch_->at_stage(o.stage());
    if (o.what->op.kind != kind::forward) return;
    if (task.differentiable) watch_->takes(shard_watch::kind::input, o.micro_batch(), given);
    if (task.carried != nullptr) watch_->takes(shard_watch::kind::carry, o.micro_batch(), *task.carried);
  }
  /// Records the gradients that a B or I gives back for these tensors.
  void watch_after(operation const& o, stage_call const& task) {
    if (row_of(o.what->op.kind).from <= 0) return;
    watch_->gives(shard_watch::kind::input, o.micro_batch(), o.slot->input_gradients);
    if (task.carried != nullptr) watch_->gives(shard_watch::kind::carry, o.micro_batch(), *task.carried);
  }

  stage_call task_of(operation const& o, step_frame const& frame) {
    int const m = o.micro_batch();
    int const stage_number = o.stage();
    split_batch const& batch = *frame.batch;
    bool const with_loss = stage_number == plan_.stages - 1 && loss_;
    std::optional<rng_key> draws;
    if (frame.step) {
      draws = {.seed = seed_, .step = *frame.step, .replica = replica_, .stage = stage_number, .micro_batch = batch.number(m)};
    }
    return {.owner = &(*stages_)[o.what->op.stage],
            .around = {.side_inputs = batch.side_inputs(m),
                       .draws = draws,
                       .drew = &o.slot->drew,
                       .evaluation = plan_.forward_only,
                       .targets = &batch.targets(m),
                       .sliced = plan_.size.slices > 1},
            .training = !plan_.forward_only,
            .differentiable = stage_number > lowest_trained_,
            .joint = joint_,
            .untrained = stage_number < lowest_trained_,
            .loss = with_loss ? &loss_ : nullptr,
            .autocast = autocast_,
            .targets = with_loss ? &batch.targets(m) : nullptr,
            .loss_seeds = seeds_of(o, frame),
            .losses = &o.slot->losses,
            .carried = carries_ ? carries_->begin(o.what->op) : nullptr,
            .seen = slices_ && frame.step ? slices_->place_of(o.what->op) : nullptr,
            .watch = watch_ != nullptr && watch_->on() ? watch_ : nullptr};
  }

  /// The gradients of a stage's declared losses, for B or I; undefined for a loss in which the microbatch counts nothing.
  /// \throws usage_error if this rank does not know the microbatch's weight in a loss
  tensors seeds_of(operation const& o, step_frame const& frame) const {
    std::size_t const count = (*stages_)[o.what->op.stage].losses().size();
    tensors out;
    if (count == 0 || row_of(o.what->op.kind).from <= 0) return out;
    at::TensorOptions const in_double = at::TensorOptions(at::kDouble).device(streams_->where());
    for (std::size_t k = 0; k < count; ++k) {
      std::size_t const of_rank = first_loss(o.stage()) + k;
      double const counts = frame.batch->loss(of_rank, o.micro_batch()).counts;
      if (std::isnan(counts)) {
        throw usage_error(
            "loss `" + (*stages_)[o.what->op.stage].losses()[k].name +
            "` is weighed by its microbatch's share of the step, and this rank has no tensors to count. Remedy: give "
            "this rank the inputs or targets; if the loss has a weight, the tensors that the weight counts");
      }
      if (counts == 0) {
        out.emplace_back();
      } else if (frame.seeds != nullptr) {
        out.push_back(frame.seeds->emplace_back(at::empty({}, in_double)));
      } else {
        out.push_back(at::full({}, frame.batch->loss_gradient(of_rank, o.micro_batch()), in_double));
      }
    }
    return out;
  }
  std::size_t place_of(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * losses_.size() + static_cast<std::size_t>(micro_batch);
  }

  plan_view plan_;
  std::vector<stage>* stages_;
  loss_function loss_;
  std::uint64_t seed_;  // of stages' random numbers
  int replica_;
  std::optional<at::ScalarType> autocast_;
  int lowest_trained_;
  bool joint_;
  own_handler own_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<activation> slots_;
  tensors losses_;
  std::vector<tensors> stage_losses_;      // indexed by `place_of(stage, microbatch)`
  std::vector<std::size_t> first_losses_;  // by stage: index of the stage's first loss among the rank's losses
  std::vector<tensors> outputs_;
  // Where they are needed.
  std::optional<carry_store> carries_;     // if the plan has slices
  std::optional<slice_agreement> slices_;  // until the first run of a plan with slices ends
  std::optional<activation_meter> meter_;  // during a run that is measured
  shard_watch* watch_;                     // null without shards
};

}  // namespace chevron::detail
