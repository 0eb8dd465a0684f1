#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/build_stages.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/preflight.hpp>
#include <chevron/run/train/rank_context.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/rank_optimizer.hpp>
#include <chevron/run/train/separate_tensors.hpp>
#include <chevron/run/train/settled_reports.hpp>
#include <chevron/run/train/static_bytes.hpp>
#include <chevron/run/train/step_accumulator.hpp>
#include <chevron/run/train/step_buffers.hpp>
#include <chevron/run/train/step_end.hpp>
#include <chevron/run/train/step_parts.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/tied_parameters.hpp>
#include <chevron/run/train/trainer_options.hpp>
#include <chevron/run/train/trainer_setup.hpp>

/// \file
/// The trainer of a rank.

namespace chevron {

namespace detail {
struct checkpoint_session;
struct trainer_access;
}  // namespace detail

/// Trains the stages of one rank. The same code runs on threads and processes: every rank constructs a trainer with equal
/// program, loss, optimizer and options, then makes the same calls of `step`.
///
///     chevron::trainer trainer({.program = program,
///                               .transport = comm,
///                               .stages = build_stage,
///                               .loss = loss,
///                               .optimizer = chevron::optimizer<torch::optim::AdamW>(3e-4)});
///     auto const report = trainer.step(tokens, next_tokens);
///
/// All ranks of a pipeline must be given the same batch (a rank without the first and the last stage may call `step()` without
/// a batch), and replicas different batches (sampler.hpp). Ranks compare batches in the first step
/// (`trainer_options::check_data`). Errors are those of error.hpp; a trainer can continue only after a `usage_error` about a
/// call's arguments.
class trainer {
 public:
  /// Builds the stages of `setup`, and compares program, options, parameters and buffers over the ranks. Collective.
  /// \throws preflight_error if ranks differ; usage_error for a stage that cannot be trained; stage_error if `stages` throws
  explicit trainer(trainer_setup setup)
      : program_(std::move(setup.program)),
        initial_program_(program_),
        context_(setup.transport, std::move(setup.loss), std::move(setup.options)),
        accumulated_(parts_.make<detail::step_accumulator>(context_.comm().topology())) {
    transport& comm = context_.comm();
    trainer_options const& options = context_.options();
    collective_scope const doing(comm, "making the trainer");
    comm.finish_earlier();
    program_view const p = initial_program_.view();
    detail::compute_streams::scope const here(*context_.streams());
    detail::check_setup(p, comm, static_cast<bool>(context_.loss()));
    detail::check(options, comm.topology());
    context_.take(detail::build_stages(p, setup.stages, comm, context_.streams()->where(), options.broadcast_buffers));
    std::vector<stage>& stages = context_.stages();
    detail::compare_ranks(comm, detail::lines_of(p, comm, options, stages));
    detail::check_separate_tensors(stages, comm);
    if (options.shard != sharding::nothing) detail::check_separate_memory(stages);

    detail::collective_numbers collectives;
    gradients_ = std::make_unique<detail::rank_gradients>(stages, comm, collectives, options.bucket_bytes, options.shard);
    detail::step_buffers::make(parts_, stages, comm.topology(), context_.streams()->where(), collectives, options);
    tied_ = detail::tied_parameters(p.plan, comm, *gradients_);
    if (!tied_.empty()) parts_.make<detail::tied_sums>(tied_);
    context_.more_slots(tied_.slots());
    gradients_->guard_shards(parts_, options.check_copies, options.device.is_cpu());
    auto const taken = detail::side_inputs_taken(stages, context_.loss());
    context_.count_with(collectives);
    optimizer_ = std::make_unique<detail::rank_optimizer>(comm, *gradients_, collectives, setup.optimizer, options);
    end_ = std::make_unique<detail::step_end>(p.plan, comm, *gradients_, tied_, *optimizer_, parts_, taken,
                                              context_.stage_losses(), options);
    context_.data(end_->data());
    make_executor();
    if (comm.connects_at_first_use()) use_collectives_once();
  }

  trainer(trainer const&) = delete;
  trainer& operator=(trainer const&) = delete;
  /// Warns on rank 0 of accumulated batches that no `step` followed, unless an exception ends the trainer.
  ~trainer() {
    if (context_.comm().topology().global_rank == 0) accumulated_.warn_of_lost(step_);
  }

  /// Takes an optimizer step on a batch of this replica, cut into microbatches along dimension 0 and into slices along
  /// dimension 1.
  /// \param total the step's sums of weights over all replicas: denominators of mean losses. 0: replicas sum their weights,
  /// which is possible only without accumulated batches
  /// \returns the step's report; with `post_validation` not always `settled` yet
  step_report step(batch const& whole = {}, step_total const& total = {}) { return step_of(whole, total); }
  /// Takes a step on microbatches that the caller has cut, as many as the program runs; their sizes may differ.
  /// \param total as above
  step_report step(std::vector<batch> const& micro_batches, step_total const& total = {}) {
    return step_of(micro_batches, total);
  }
  /// Takes a step on a batch without side inputs.
  step_report step(tensors const& inputs, tensors const& targets, step_total const& total = {}) {
    return step_of(batch{inputs, targets}, total);
  }
  /// Takes a step on one input and one target.
  step_report step(at::Tensor const& input, at::Tensor const& target, step_total const& total = {}) {
    return step_of(batch{{input}, {target}}, total);
  }

  /// Adds the gradients of a batch to those of the next `step`, which must be given the same `total`. If a batch is too large
  /// for one run of the program, call `accumulate` for some parts and `step` for the last. \param total as of `step`, above 0
  void accumulate(batch const& whole, step_total const& total) { accumulate_of(whole, total); }
  /// Accumulates microbatches that the caller has cut. \param micro_batches as of `step`
  void accumulate(std::vector<batch> const& micro_batches, step_total const& total) { accumulate_of(micro_batches, total); }
  /// Accumulates a batch without side inputs.
  void accumulate(tensors const& inputs, tensors const& targets, step_total const& total) {
    accumulate(batch{inputs, targets}, total);
  }
  /// Accumulates one input and one target.
  void accumulate(at::Tensor const& input, at::Tensor const& target, step_total const& total) {
    accumulate(batch{{input}, {target}}, total);
  }

  /// Drops the gradients that `accumulate` has added since the last step, as `zero_grad()` does in a loop without a trainer; the
  /// next `accumulate` or `step` begins a step anew. No effect if no gradients wait. All ranks must make the same calls.
  void drop_accumulated() {
    if (accumulating()) parts_.drop();
  }

  /// Waits for the verdict on the last step (`post_validation`) and for the step's parameters (`overlap_gather`). Must be
  /// called before reading parameters or the optimizer, and at the end; evaluators and checkpoints call it. Collective.
  /// \returns the report of the last step, settled
  step_report synchronize() {
    detail::compute_streams::scope const here(*context_.streams());
    end_->check_unchanged();
    if (end_->pending()) {
      settle();
      if (reports_.last().skipped) parts_.skip();
    }
    optimizer_->finish_gather();
    return reports_.tell();
  }

  /// Compares copies of parameters now, as `trainer_options::check_copies` does every n-th step. Collective, between two steps.
  /// \throws preflight_error or usage_error naming stage, tensor and ranks, the same on every rank; and as `check_finite`
  void check_copies() { check_parameters("check_copies", true); }
  /// Checks that all trained parameters and their masters are finite, and that the optimizer's state contains no NaN, as saves
  /// do. Collective, between two steps. \throws numerical_error naming a parameter, the same on every rank
  void check_finite() { check_parameters("check_finite", false); }
  /// Checks as `check_copies`, or as `check_finite` if `trainer_options::check_copies` is 0. For functions that save a trainer.
  /// Collective, between two steps. \param call a literal, the name of the function that saves, which errors quote
  /// \throws the errors of the two checks
  void check_before_save(char const* call) { check_parameters(call, context_.options().check_copies > 0); }

  /// Replaces the program between two steps; parameters, optimizer and step number are unchanged. If both programs add
  /// gradients in the same order (gradient_order.hpp), training computes the same bits. Collective.
  /// \throws usage_error while gradients wait for their `step`, or for a program of another size or with stages on other ranks;
  /// preflight_error if ranks were given different programs. After these errors training may continue under the old program
  /// \returns the old program
  proved_program change_schedule(proved_program next) {
    detail::compute_streams::scope const here(*context_.streams());
    detail::check_change(context_.comm(), program_.view(), next.view(), accumulating());
    synchronize();
    std::swap(program_, next);
    executor_.reset();
    make_executor();
    return next;
  }

  /// Whether training should stop now: a signal (`stop_signals`), the clock (`request_stop_after`) or `request_stop` asked a
  /// rank to stop. Equal on all ranks; known after the step of the request, or with `post_validation` after the next step.
  bool should_stop() const { return !end_->stop_reason().empty(); }
  std::string const& stop_reason() const { return end_->stop_reason(); }  ///< the first request, and its rank; empty: none

  /// The stages by number; stages of other ranks are empty.
  std::vector<stage>& stages() { return context_.stages(); }
  /// This rank's optimizer; null if the rank trains nothing. Groups contain masters (`master_parameters`) or pieces (`shard`).
  torch::optim::Optimizer* optimizer() { return optimizer_->get(); }
  /// The tensor that an unsharded optimizer steps for a parameter: the parameter's float32 master (`master_parameters`), else the
  /// parameter itself.
  at::Tensor const& master_of(at::Tensor const& parameter) const { return optimizer_->stepped(parameter); }
  transport& comm() { return context_.comm(); }             ///< the transport of `trainer_setup`
  program_view program() const { return program_.view(); }  ///< the program that the next step runs
  loss_scale& scaling() { return end_->scaling(); }         ///< the factor of loss scaling, which checkpoints contain
  /// The actions of this rank in its last step, and their times.
  rank_trace const& last_trace() const { return executor_->last_trace(); }
  /// Lets the next run measure the bytes that stages hold per microbatch. Results are unchanged; the run is slower.
  void measure_bytes() { executor_->measure_bytes(); }
  /// The measured bytes of this rank's stages, per microbatch and permanent (measured_bytes.hpp); call after a settled step.
  std::vector<measured_bytes> bytes_by_stage() {
    return detail::bytes_by_stage(context_.stages(), *gradients_, *optimizer_, measured_);
  }
  /// The seconds of the last step in which this rank waited for the replicas' sums instead of computing.
  double last_sum_wait() const { return gradients_->sum_wait(); }
  /// The reason, in words, why computations of the last step were not launched as graphs; empty if they were.
  std::string graph_fallback_reason() const { return executor_->graph_fallback_reason(); }

  long next_step() const { return step_; }     ///< the number of the next step, from 0
  void next_step(long step) { step_ = step; }  ///< sets the number of the next step, as `load_checkpoint` does
  bool accumulating() const { return accumulated_.passes() > 0; }  ///< whether gradients wait for their `step`

 private:
  friend struct detail::trainer_access;

  void cut(batch const& whole) {
    check_detached(whole);
    context_.cut(whole, program_.view().plan, batch_);
  }
  void cut(std::vector<batch> const& micro_batches) {
    for (batch const& one : micro_batches) check_detached(one);
    context_.cut(micro_batches, program_.view().plan, batch_);
  }

  void make_executor() {
    trainer_options const& o = context_.options();
    detail::executor_settings settings{o.seed, o.autocast, context_.streams(), o.graphs, end_->lowest_trained(), o.own_actions};
    if (optimizer_->gathers_late()) settings.unshard = [this](int stage) { optimizer_->finish_gather(stage); };
    if (context_.comm().topology().shards > 1) settings.watch = &detail::shards_watched(context_.comm());
    settings.before_backward = [this] { context_.finish_shares(batch_); };
    executor_ = std::make_unique<detail::executor>(program_, context_.comm(), context_.stages(), context_.loss(), settings,
                                                   gradients_.get());
  }

  /// Runs each collective of a step once, so that ranks connect: gradients are still zero, and buffers equal on all replicas.
  void use_collectives_once() {
    gradients_->start_sums();
    gradients_->wait_sums();
    parts_.connect(context_.comm());
    context_.connect_counts();
    end_->gather_once();
  }

  template <class Given>
  step_report step_of(Given const& given, step_total const& total) {
    std::int64_t const begin = now_ns();
    detail::compute_streams::scope const here(*context_.streams());
    accumulated_.count_call();
    take(given, total, true);
    detail::run_result const run = run_program(true);
    step_report next{.step = step_};
    detail::executor::optimizer_turn turn(*executor_);
    try {
      end_step(run, next);
      turn.ends();
    } catch (...) {
      turn.fails();
    }
    if (auto found = executor_->take_measured_bytes()) measured_ = *std::move(found);
    accumulated_.end_pass(run.trace, run.used_graphs, now_ns() - begin);
    accumulated_.end_step(next);
    ++step_;
    reports_.add(next);
    return reports_.tell();
  }

  template <class Given>
  void accumulate_of(Given const& given, step_total const& total) {
    std::int64_t const begin = now_ns();
    detail::compute_streams::scope const here(*context_.streams());
    accumulated_.count_call();
    if (!(total.model > 0))
      throw usage_error(
          "accumulate() needs the total of the whole step over all replicas: its samples, or units of "
          "trainer_options::loss_weight");
    take(given, total, false);
    detail::run_result const run = run_program(false);
    parts_.add(pass_of(run), *executor_);
    accumulated_.end_pass(run.trace, run.used_graphs, now_ns() - begin);
    gradients_->end_of_pass();
  }

  /// Cuts, checks and weighs the batch before each run of the program. Functions of the batch (`slice_cuts`, `loss_weight`) draw
  /// random numbers from a stream that is equal on all ranks of a pipeline.
  template <class Given>
  void take(Given const& given, step_total const& total, bool last) {
    random_scope const draws(context_.batch_key(step_, accumulated_.passes() * program_.view().plan.size.units()));
    cut(given);
    prepare(total, last);
  }

  /// Checks and weighs the batch before each run of the program.
  void prepare(step_total const& total, bool last) {
    end_->data().check_taken(batch_);
    accumulated_.check_total(total, context_.stage_losses(), last);
    context_.share_loss(batch_, total);
    bool const first = accumulated_.passes() == 0;
    end_->check_unchanged();
    optimizer_->check_rates({.rank = context_.comm().topology().global_rank});
    batch_.number_from(accumulated_.passes() * batch_.count());
    context_.open_for(*executor_, batch_, end_->shapes_may_differ());
    if (first) {
      gradients_->check_frozen();
      gradients_->check_forms();
      check_modules();
      parts_.begin(end_->pending());
    }
    parts_.take(context_.comm(), batch_, step_);
    context_.start_shares();
  }

  /// Compares the modules' parameters with those that are trained, before the second step and before every n-th.
  void check_modules() {
    int const every = context_.options().check_copies;
    long const number = begun_++;
    if (number == 1 || (every > 0 && number % every == 0)) detail::check_registered(context_.stages());
  }

  /// Computes gradients; with a step pending, begins on its parameters, waits for its verdict, and restarts if it was undone.
  detail::run_result run_program(bool last) {
    if (!end_->pending()) {
      accumulated_.passes() == 0 ? gradients_->zero() : gradients_->take_over_changes();
      batch_.scale_gradients(end_->scaling().factor(), context_.loss().weighed());
      executor_->begin(batch_, step_, last);
      return executor_->finish();
    }
    executor_->begin(batch_, step_, last);
    executor_->run_ahead();
    if (!settle()) {
      parts_.begin_again(reports_.last().skipped);
      executor_->withdraw();
    }
    gradients_->zero();
    batch_.scale_gradients(end_->scaling().factor(), context_.loss().weighed());
    return executor_->finish();
  }

  /// Sums the gradients of the step, decides with all ranks, and steps.
  void end_step(detail::run_result const& run, step_report& report) {
    transport& comm = context_.comm();
    parts_.start(comm);
    auto norms = end_->complete_gradients(step_, executor_->slots());
    parts_.add(pass_of(run), *executor_, std::move(norms));
    end_->run(report);
    if (end_->pending() || optimizer_->gathers_late()) comm.finish_before_others(settles_);
    parts_.finish(comm);
    if (report.skipped) parts_.skip();
  }

  detail::step_pass pass_of(detail::run_result const& run) {
    return {batch_, context_.all_counts(), context_.stage_losses(), run};
  }

  /// \param call a literal, the name of the call that checks, for errors \param copies whether copies are compared, too
  void check_parameters(char const* call, bool copies) {
    synchronize();
    detail::check_registered(context_.stages());
    detail::compute_streams::scope const here(*context_.streams());
    collective_scope const doing(context_.comm(), call);
    end_->check_finite(step_);
    if (copies) end_->check_copies(step_, call);
  }

  /// Waits for the verdict on the last step. \returns false if the step was undone
  bool settle() {
    bool const stands = end_->verdict(reports_.last());
    reports_.settle();
    return stands;
  }

  proved_program program_;
  proved_program const initial_program_;  // never replaced, since members have views of its plan
  detail::rank_context context_;
  detail::step_parts parts_;
  detail::step_accumulator& accumulated_;  // of `parts_`
  std::unique_ptr<detail::rank_gradients> gradients_;
  detail::tied_parameters tied_;
  std::unique_ptr<detail::rank_optimizer> optimizer_;
  std::unique_ptr<detail::step_end> end_;
  std::unique_ptr<detail::executor> executor_;
  detail::split_batch batch_;
  std::shared_ptr<std::function<void()> const> settles_ =
      std::make_shared<std::function<void()> const>([this] { synchronize(); });
  std::shared_ptr<detail::checkpoint_session> checkpoints_;
  std::vector<measured_bytes> measured_;  // by stage, of the last measured run
  detail::settled_reports reports_{context_.options().on_report};
  long step_ = 0, begun_ = 0;  // begun_: number of steps begun by this trainer
};

namespace detail {

/// The members of a trainer that evaluators, checkpoints and planners use.
struct trainer_access {
  static rank_optimizer& optimizer(trainer& of) { return *of.optimizer_; }
  static rank_context& context(trainer& of) { return of.context_; }
  /// The state of a trainer's checkpoints, which checkpoint.hpp manages; null before the first checkpoint.
  static std::shared_ptr<checkpoint_session>& checkpoints(trainer& of) { return of.checkpoints_; }
};

}  // namespace detail

}  // namespace chevron
