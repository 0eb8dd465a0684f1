#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/train/batch_data.hpp>
#include <chevron/run/train/batch_shapes.hpp>
#include <chevron/run/train/batch_weights.hpp>
#include <chevron/run/train/copy_agreement.hpp>
#include <chevron/run/train/finite_parameters.hpp>
#include <chevron/run/train/model_losses.hpp>
#include <chevron/run/train/model_norm.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/rank_optimizer.hpp>
#include <chevron/run/train/rate_agreement.hpp>
#include <chevron/run/train/stage_losses.hpp>
#include <chevron/run/train/step_names.hpp>
#include <chevron/run/train/step_parts.hpp>
#include <chevron/run/train/step_policy.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/step_times.hpp>
#include <chevron/run/train/stop_agreement.hpp>
#include <chevron/run/train/tied_parameters.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// Ends a step: gathers the numbers that decide whether the optimizer may step, then changes parameters. A model for SPIN is
/// tests/model_checking/post_validation.pml. An exception of the optimizer reaches `trainer`, which passes the exception to
/// `executor::optimizer_turn` (run/execute/executor.hpp).

namespace chevron::detail {

/// Decides with all ranks whether a step is applied, and lets the optimizer step.
///
/// All ranks gather equal numbers, which the parts of the step judge (step_parts.hpp), so all clip, skip or stop together
/// (step_policy.hpp).
///
/// With post-validation (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4) a rank steps before the numbers of
/// all ranks are gathered: the rank starts the gather, steps as if all gradients were finite and the norm within its limit, and
/// begins the next step. During the next step the rank calls `verdict`, which undoes a wrong step from a snapshot, and repeats
/// it unless skipped. A rank whose own gradients prove the step wrong steps only after the verdict.
class step_end {
 public:
  /// Gathers the names of all ranks' parameters, and compares the optimizers of copies. Collective.
  /// \param gradients gradients of this rank's stages \param tied of these
  /// \param optimizer of this rank \param parts receives the parts of the step; all of these must outlive this object, like
  /// `options`
  /// \param taken names of the side inputs that this rank's stages read \param losses losses that this rank's stages declare
  /// \throws usage_error for a hook that `options` exclude; preflight_error if optimizers of replicas differ
  step_end(plan_view plan, transport& comm, rank_gradients& gradients, tied_parameters& tied, rank_optimizer& optimizer,
           step_parts& parts, std::vector<std::string> const& taken, std::span<detail::rank_loss const> losses,
           trainer_options const& options)
      : comm_(&comm),
        gradients_(&gradients),
        options_(&options),
        parts_(&parts),
        optimizer_(&optimizer),
        copies_(comm.topology(), gradients, tied, optimizer, options),
        names_(plan, comm.topology(), detail::step_names::said(gradients, taken, losses).gather(comm)),
        policy_(options) {
    make_parts(plan);
    detail::check_hook(optimizer.parameters(), options);
    copies_.check(comm, /*values=*/false, {.rank = comm.topology().global_rank, .action = "preflight"});
  }

  /// The first half of a step's end: waits for the sums over replicas, sums gradients of tied parameters, and computes norms.
  /// Collective.
  /// \param program counts of slots that the program uses
  /// \returns requests for norms on an accelerator, which the caller must read before `run`
  scalar_reader complete_gradients(long step, slot_counts program) {
    step_ = step;
    rate_ = detail::rate_of_step(options_->learning_rate, step, optimizer_->get(), here());
    optimizer_->take_changes();
    gradients_->check_attached();
    gradients_->wait_sums();
    parts_->sum(*comm_, program, here());
    if (double const factor = policy_.scaling().factor(); factor != 1) gradients_->scale(1 / factor);
    scalar_reader norms;
    parts_->complete(norms);
    return norms;
  }

  /// The second half of a step's end: decides with all ranks, and steps. Collective. With post-validation the report may remain
  /// unsettled: the step is then `pending`, and the caller must call `verdict` before gradients are written again.
  /// \param report receives the decision and the figures of the step
  void run(step_report& report) {
    parts_->write();
    optimizer_->begin();
    report.learning_rate = rate_;
    report.loss_factor = policy_.scaling().factor();
    if (!options_->post_validation || !policy_.is_stable()) {
      gather_numbers();
      judge(report);
      return apply(report);
    }
    parts_->start_gather(*comm_);
    pending_ = true;
    record const& mine = parts_->mine();
    if (!policy_.certainly_wrong(mine.numbers(losses_->by_micro_batch()), mine.numbers(norm_->squares())))
      optimizer_->step_provisionally(rate_);
    optimizer_->start_gather(step_);  // even if this rank did not step, since another replica may have stepped
    gradient_changes_ = gradients_->changes();
    optimizer_->note(/*pending=*/true);
  }

  bool pending() const { return pending_; }  ///< whether a step waits for its `verdict`

  /// Checks the optimizer for changes by the caller since the last step, as `rank_optimizer::check_unchanged` does.
  void check_unchanged() { optimizer_->check_unchanged(step_, pending_, {.rank = comm_->topology().global_rank}); }

  /// Compares copies of parameters, and the optimizer state and options of each copy. Collective; no step may be pending.
  /// \param next_step number of the next step \param call the name of the call that compares, for errors
  /// \throws preflight_error or usage_error, see copy_agreement::check
  void check_copies(long next_step, char const* call) const {
    copies_.check(*comm_, /*values=*/true,
                  {.rank = comm_->topology().global_rank, .step = next_step, .action = call});
  }

  /// Checks that all parameters, masters and states of all ranks are finite. Collective; no step may be pending.
  /// \param next_step number of the next step
  /// \throws numerical_error, the same on every rank, naming the first parameter that is not
  void check_finite(long next_step) const {
    std::string const mine = finite_parameters::find(*optimizer_);
    std::vector<std::string> const all = comm_->all_gather_text(mine);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty()) continue;
      throw numerical_error(
          all[rank] + " on rank " + std::to_string(rank) + " is infinite or NaN before step " + std::to_string(next_step) +
              ": a step whose gradients were finite made it so, and no later step can be right. Remedy: load_checkpoint of the "
              "last checkpoint; then lower rates of all groups, eps above 0 (1e-8 is 0 in float16), or master_parameters",
          {comm_->topology().global_rank, -1, next_step, "", {static_cast<int>(rank)}});
    }
  }

  /// Waits for the gather of the pending step; undoes a wrong step, and repeats it unless it is skipped. Collective.
  /// \param report the report of the pending step, which `run` received
  /// \returns true if the step was right; false: parameters changed since `run` returned, on this rank or on another
  bool verdict(step_report& report) {
    optimizer_->finish_gather();
    parts_->finish_gather(*comm_);
    pending_ = false;
    try {
      judge(report);
    } catch (numerical_error const&) {
      undo_on_all(/*waits=*/true);
      throw;
    } catch (preflight_error const&) {
      undo_on_all(/*waits=*/true);
      throw;
    } catch (...) {
      undo_on_all(/*waits=*/false);
      throw;
    }
    if (!report.skipped && !report.clipped) return true;
    if (!report.skipped && gradient_changes_ != gradients_->changes()) {
      throw usage_error(
          "gradients were changed in place (zero_grad(false)?) after step() returned, and the step has to be done over with "
          "them. "
          "Remedy: synchronize() before that, zero_grad() which empties them, or no post_validation",
          here());
    }
    gradients_->attach_all();  // zero_grad() may have emptied them
    // The caller may have set learning rates for the next step since `run` returned.
    std::vector<double> const rates_of_next = optimizer_->rates();
    optimizer_->undo();
    apply(report);
    if (report.skipped) gather_parameters();
    if (!options_->learning_rate) optimizer_->set_rates(rates_of_next);
    return false;
  }

  /// Runs the gathers of a step once, for a transport that connects ranks at the first use. Collective.
  void gather_once() {
    gather_parameters();
    parts_->gather_once(*comm_, options_->post_validation);
  }

  /// The comparison of the batch tensors that several ranks of a pipeline read.
  detail::data_agreement const& data() const { return data_->agreement(); }

  /// The number of the first stage with a parameter that needs a gradient.
  int lowest_trained() const { return names_.lowest_trained(); }

  /// Whether ranks of a pipeline may have batches of different shapes (`batch_shapes::may_differ`).
  bool shapes_may_differ() const { return shapes_->may_differ(); }

  /// The factor of loss scaling, by which the next loss is multiplied before its backward.
  loss_scale& scaling() { return policy_.scaling(); }

  /// Words for the first stop request of a rank (`stop_agreement::reason`).
  std::string const& stop_reason() const { return stop_->reason(); }

 private:
  /// Makes the parts of a step that end with it, in the order in which they judge.
  void make_parts(plan_view plan) {
    topology const& where = comm_->topology();
    trainer_options const& o = *options_;
    double const tolerance = o.device.is_cpu() ? 0 : 1e-3;
    int const lowest = names_.lowest_trained();
    int const first = lowest < plan.stages ? rank_of_stage(plan, where, 0, lowest) : 0;
    if (o.check_copies > 0) parts_->make<finite_of_step>(where, o.check_copies, *optimizer_);
    parts_->make<batch_weights>(where);
    data_ = &parts_->make<batch_data>(data_agreement(plan, where, names_.taken, o.check_data), o.when_same_batch);
    shapes_ = &parts_->make<batch_shapes>(where);
    parts_->make<rate_agreement>(where, rate_, static_cast<bool>(o.learning_rate), first);
    if (copies_.width() > 0) parts_->make<copies_of_step>(copies_);
    parts_->make<step_times>(where);
    stop_ = &parts_->make<stop_agreement>(where);
    losses_ = &parts_->make<model_losses>(plan, where, tolerance);
    if (names_.most_losses(plan) > 0) parts_->make<stage_losses>(plan, where, names_, tolerance);
    norm_ = &parts_->make<model_norm>(plan, where, names_, *gradients_, o, tolerance);
  }

  /// Lets the parts judge the numbers of all ranks, and decides whether the step is applied, clipped or skipped.
  void judge(step_report& report) {
    decision const found = parts_->judge(report, here(), [this](decision& so_far) {
      if (std::exchange(so_far.parameter_lost, false)) check_finite_before();
      if (!so_far.copies.words.empty()) refuse_copies(so_far.copies);
    });
    if (!found.loss_culprit.empty() || !found.gradient_culprit.empty()) check_finite_before();
    policy_.decide(report, found.loss_culprit, found.gradient_culprit, here());
    report.settled = true;
  }

  /// Checks the parameters that this step computed with, if its numbers are not finite: the cause may be an earlier step. If
  /// this step was pending, restores the parameters first. Collective. \throws numerical_error as `check_finite`
  void check_finite_before() {
    if (optimizer_->provisional()) {
      std::vector<double> const rates = optimizer_->rates();  // the caller's, for the next step
      optimizer_->undo();
      optimizer_->set_rates(rates);
    }
    check_finite(step_);
  }

  /// Refuses a step before which copies of parameters differed; undoes the step first. Collective.
  /// \throws preflight_error or usage_error, the same on every rank
  void refuse_copies(unequal_ranks const& difference) {
    undo_on_all(/*waits=*/false);
    copies_.check(*comm_, /*values=*/true, here());
    throw preflight_error(difference.words +
                              " in this step, and no longer do. Remedy: change options, parameters and the optimizer's "
                              "state between two steps, on all ranks alike, with overlap_gather or post_validation after "
                              "trainer.synchronize()",
                          naming(here(), difference.ranks));
  }

  void apply(step_report const& report) {
    if (report.skipped) return;
    if (report.clipped) gradients_->scale(policy_.clip_factor(report));
    optimizer_->set_up(report.learning_rate);
    // All replicas draw equal random numbers, which depend on the rank's first stage.
    tensors near;
    rng_key key{.seed = options_->seed, .step = step_, .use = random_use::optimizer_step};
    if (auto const& mine = optimizer_->parameters(); !mine.empty()) {
      key.stage = mine.front().stage;
      near.push_back(mine.front().value);
    }
    random_scope const draws(key, near);
    if (options_->before_optimizer_step)
      options_->before_optimizer_step({step_, report.loss, report.grad_norm, report.learning_rate, optimizer_->stepped()});
    optimizer_->step();
    static_cast<void>(draws.drew());  // refuses a generator that ranks share
    optimizer_->start_gather(step_);
    if (!options_->overlap_gather) optimizer_->finish_gather();
    optimizer_->note(/*pending=*/false);
  }
  void gather_parameters() {
    optimizer_->start_gather(step_);
    optimizer_->finish_gather();
  }

  void gather_numbers() {
    collective_scope const doing(*comm_, "norm of the gradient");
    parts_->gather(*comm_);
  }

  /// Undoes the step, before the caller throws an error on every rank.
  /// \param waits true if all ranks throw the same error: ranks then wait for each other, as one that ends early would be
  /// reported lost
  void undo_on_all(bool waits) {
    optimizer_->undo();
    try {
      gather_parameters();
      if (waits) gather_numbers();
    } catch (error const&) {
      // The caller throws the first error, which names the cause.
    }
  }

  error_context here() const { return {comm_->topology().global_rank, -1, step_, "OPTIMIZER_STEP"}; }

  transport* comm_;
  rank_gradients* gradients_;
  trainer_options const* options_;
  step_parts* parts_;
  rank_optimizer* optimizer_;
  detail::copy_agreement copies_;
  step_names names_;
  step_policy policy_;

  long step_ = -1;
  double rate_ = 0;  // learning rate of this step
  bool pending_ = false;               // the gather is under way
  std::int64_t gradient_changes_ = 0;  // number of changes of gradients, when `run` returned
  batch_data* data_ = nullptr;  // these and the next ones: parts of `parts_`
  batch_shapes* shapes_ = nullptr;
  stop_agreement* stop_ = nullptr;
  model_losses* losses_ = nullptr;
  model_norm* norm_ = nullptr;
};

}  // namespace chevron::detail
