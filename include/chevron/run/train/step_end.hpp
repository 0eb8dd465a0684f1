#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

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
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/copy_agreement.hpp>
#include <chevron/run/train/finite_parameters.hpp>
#include <chevron/run/train/master_parameters.hpp>
#include <chevron/run/train/model_losses.hpp>
#include <chevron/run/train/model_norm.hpp>
#include <chevron/run/train/optimizer_calls.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/optimizer_share.hpp>
#include <chevron/run/train/optimizer_snapshot.hpp>
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

/// Owns the optimizer of one rank, and decides with all ranks whether a step is applied.
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
  /// Constructs the optimizer, and gathers the names of all ranks' parameters. Collective.
  /// \param gradients gradients of this rank's stages \param tied of these; gradients must outlive this object, like `options`
  /// \param parts receives the parts of the step; must outlive this object
  /// \param collectives from which gathers of parameters over the replicas claim their numbers
  /// \param taken names of the side inputs that this rank's stages read \param losses losses that this rank's stages declare
  /// \throws usage_error for an optimizer that `options` exclude; preflight_error if optimizers of replicas differ
  step_end(plan_view plan, transport& comm, rank_gradients& gradients, tied_parameters& tied, step_parts& parts,
           collective_numbers& collectives, std::vector<std::string> const& taken, std::span<detail::rank_loss const> losses,
           optimizer_factory const& make, trainer_options const& options)
      : comm_(&comm),
        gradients_(&gradients),
        options_(&options),
        parts_(&parts),
        parameters_(gradients.parameters()),
        has_masters_(options.master_parameters),
        masters_(has_masters_, parameters_),
        optimizer_(detail::make_optimizer(comm, make, parameters_, masters_, options)),
        share_(detail::make_share(optimizer_.get(), make.steps_pieces(), gradients, masters_, comm.topology(), collectives,
                                  options)),
        calls_(optimizer_.get()),
        copies_(comm.topology(), gradients, tied, masters_, share_.get(), options),
        names_(plan, comm.topology(), detail::step_names::said(gradients, taken, losses).gather(comm)),
        policy_(options) {
    make_parts(plan);
    detail::check_hook(parameters_, options);
    copies_.check(comm, optimizer_.get(), /*values=*/false, {.rank = comm.topology().global_rank, .action = "preflight"});
  }

  /// Waits for the parameters that other replicas stepped: of `stage`; if empty, of all stages. Collective over the replicas.
  void finish_gather(std::optional<int> stage = {}) {
    if (share_) share_->finish_gather(*comm_, stage);
  }
  bool gathers_late() const { return share_ && (options_->overlap_gather || options_->post_validation); }  ///< after the step
  optimizer_share* share() { return share_.get(); }  ///< this replica's share; null unless the optimizer is sharded
  master_parameters& masters() { return masters_; }  ///< this rank's masters; none without `trainer_options::master_parameters`

  /// The first half of a step's end: waits for the sums over replicas, sums gradients of tied parameters, and computes norms.
  /// Collective.
  /// \param program counts of slots that the program uses
  /// \returns requests for norms on an accelerator, which the caller must read before `run`
  scalar_reader complete_gradients(long step, slot_counts program) {
    step_ = step;
    rate_ = detail::rate_of_step(options_->learning_rate, step, optimizer_.get(), here());
    if (has_masters_) masters_.take_changes();
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
    stepped_ = false;
    rates_ = detail::group_rates(optimizer_.get());
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
    if (optimizer_ && !policy_.certainly_wrong(mine.numbers(losses_->by_micro_batch()), mine.numbers(norm_->squares()))) {
      before_.take(*optimizer_);
      set_up(rate_);
      step_optimizer();
      stepped_ = true;
    }
    // Even if this rank did not step, since another replica may have stepped.
    if (share_) share_->start_gather(*comm_, step_);
    gradient_changes_ = gradients_->changes();
    if (optimizer_) before_.note_versions(*optimizer_);
    calls_.note(optimizer_.get());
  }

  bool pending() const { return pending_; }  ///< whether a step waits for its `verdict`

  /// Checks what the caller has done since the last step. To be called before anything else waits for this step's gathers.
  /// \throws usage_error for parameters that were changed while their gather is under way; for parameters, or the optimizer's
  /// state, that were changed while the step is pending, since `verdict` would overwrite the change if it undid the step; for a
  /// call of the optimizer's `step`; and for tensors that were added to the optimizer's groups
  void check_unchanged() {
    calls_.check_groups(optimizer_.get(), between());
    calls_.check_not_stepped(optimizer_.get(), step_, between());
    if (pending_ && optimizer_) {
      at::Tensor const rounded = masters_.changed(), stepped = before_.changed(*optimizer_);
      if (rounded.defined() || stepped.defined()) {
        throw usage_error(detail::words_for(parameters_, rounded.defined() ? rounded : of_stepped(stepped)) +
                              ", or the optimizer's state for this parameter, was changed after step " + std::to_string(step_) +
                              ". With post_validation that step may yet be undone, together with the change. Remedy: "
                              "trainer.synchronize() before the change",
                          between());
      }
    }
    at::Tensor const changed = share_ ? share_->changed() : at::Tensor();
    if (!changed.defined()) return;
    throw usage_error(detail::words_for(parameters_, changed) + " was changed after step " + std::to_string(step_) +
                          ", while the values that other replicas stepped are still being gathered (" +
                          (pending_ ? "post_validation" : "overlap_gather") +
                          "): the gather overwrites a part of the change. Remedy: trainer.synchronize() before the change",
                      between());
  }
  /// Checks the rates that the caller has set for the next step. \throws usage_error for a rate that no step can use
  void check_rates() const {
    if (!options_->learning_rate) calls_.check_rates(optimizer_.get(), between());
  }

  /// Compares copies of parameters, and the optimizer state and options of each copy. Collective; no step may be pending.
  /// \param next_step number of the next step \param call the name of the call that compares, for errors
  /// \throws preflight_error or usage_error, see copy_agreement::check
  void check_copies(long next_step, char const* call) const {
    copies_.check(*comm_, optimizer_.get(), /*values=*/true,
                  {.rank = comm_->topology().global_rank, .step = next_step, .action = call});
  }

  /// Checks that all parameters, masters and states of all ranks are finite. Collective; no step may be pending.
  /// \param next_step number of the next step
  /// \throws numerical_error, the same on every rank, naming the first parameter that is not
  void check_finite(long next_step) const {
    finite_parameters::lost const found = finite_parameters::find(optimizer_.get(), masters_);
    std::string mine;
    if (found.stepped.defined()) {
      at::Tensor const of = of_stepped(found.stepped);
      mine = (found.kept.empty() ? "" : "the optimizer's " + found.kept + " of ") +
             (of.defined() ? detail::words_for(parameters_, of) : std::string("a parameter"));
    }
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
    finish_gather();
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
    std::vector<double> const rates_of_next = detail::group_rates(optimizer_.get());
    undo();
    apply(report);
    if (report.skipped) gather_parameters();
    if (optimizer_ && !options_->learning_rate) detail::set_group_rates(*optimizer_, rates_of_next);
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

  /// Calls `see(tensor)` for a parameter's master, its optimizer state and, with post-validation, the snapshot's copies.
  /// \param p a trained parameter of this rank
  /// \returns false if the optimizer is of an unknown class, whose state cannot be listed
  template <class See>
  bool each_tensor_of(at::Tensor const& p, See const& see) {
    at::Tensor const piece = share_ ? share_->piece_of(p) : masters_.stepped(p);
    return optimizer_ == nullptr || detail::each_tensor_of(*optimizer_, before_, piece, masters_.has(p), see);
  }

  /// This rank's optimizer; null on a rank without trained parameters.
  torch::optim::Optimizer* optimizer() { return optimizer_.get(); }

 private:
  /// Makes the parts of a step that end with it, in the order in which they judge.
  void make_parts(plan_view plan) {
    topology const& where = comm_->topology();
    trainer_options const& o = *options_;
    double const tolerance = o.device.is_cpu() ? 0 : 1e-3;
    int const lowest = names_.lowest_trained();
    int const first = lowest < plan.stages ? rank_of_stage(plan, where, 0, lowest) : 0;
    if (o.check_copies > 0) parts_->make<finite_of_step>(where, o.check_copies, optimizer_.get(), masters_);
    parts_->make<batch_weights>(where);
    data_ = &parts_->make<batch_data>(data_agreement(plan, where, names_.taken, o.check_data), o.when_same_batch);
    shapes_ = &parts_->make<batch_shapes>(where);
    parts_->make<rate_agreement>(where, rate_, static_cast<bool>(o.learning_rate), first);
    if (copies_.width() > 0) parts_->make<copies_of_step>(copies_, optimizer_.get());
    parts_->make<step_times>(where);
    stop_ = &parts_->make<stop_agreement>(where);
    losses_ = &parts_->make<model_losses>(plan, where, tolerance);
    if (names_.most_losses(plan) > 0) parts_->make<stage_losses>(plan, where, names_, tolerance);
    norm_ = &parts_->make<model_norm>(plan, where, names_, *gradients_, masters_, o, tolerance);
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
    if (stepped_) {
      std::vector<double> const rates = detail::group_rates(optimizer_.get());  // the caller's, for the next step
      undo();
      detail::set_group_rates(*optimizer_, rates);
    }
    check_finite(step_);
  }

  /// Refuses a step before which copies of parameters differed; undoes the step first. Collective.
  /// \throws preflight_error or usage_error, the same on every rank
  void refuse_copies(unequal_ranks const& difference) {
    undo_on_all(/*waits=*/false);
    copies_.check(*comm_, optimizer_.get(), /*values=*/true, here());
    throw preflight_error(difference.words +
                              " in this step, and no longer do. Remedy: change options, parameters and the optimizer's "
                              "state between two steps, on all ranks alike, with overlap_gather or post_validation after "
                              "trainer.synchronize()",
                          naming(here(), difference.ranks));
  }

  void apply(step_report const& report) {
    if (report.skipped) return;
    if (report.clipped) gradients_->scale(policy_.clip_factor(report));
    if (optimizer_) set_up(report.learning_rate);
    // All replicas draw equal random numbers, which depend on the rank's first stage.
    tensors near;
    rng_key key{.seed = options_->seed, .step = step_, .use = random_use::optimizer_step};
    if (!parameters_.empty()) {
      key.stage = parameters_.front().stage;
      near.push_back(parameters_.front().value);
    }
    random_scope const draws(key, near);
    if (options_->before_optimizer_step)
      options_->before_optimizer_step(
          {step_, report.loss, report.grad_norm, report.learning_rate, masters_.stepped(parameters_)});
    if (optimizer_) step_optimizer();
    static_cast<void>(draws.drew());  // refuses a generator that ranks share
    if (share_) share_->start_gather(*comm_, step_);
    if (!options_->overlap_gather) finish_gather();
    calls_.note(optimizer_.get());
  }
  void gather_parameters() {
    if (!share_) return;
    share_->start_gather(*comm_, step_);
    share_->finish_gather(*comm_);
  }

  /// Sets learning rate and `.grad` of all parameters for the optimizer's step.
  void set_up(double rate) {
    if (options_->learning_rate) detail::set_group_rates(*optimizer_, rate);
    share_ ? share_->set_gradients() : gradients_->round(masters_);
  }

  void step_optimizer() {
    optimizer_->step();
    if (has_masters_) masters_.round();
  }

  void gather_numbers() {
    collective_scope const doing(*comm_, "norm of the gradient");
    parts_->gather(*comm_);
  }

  /// Restores parameters, masters, state and learning rates from before the pending step.
  void undo() {
    finish_gather();
    if (stepped_) before_.put_back(*optimizer_);
    if (has_masters_) masters_.round();
    if (optimizer_) detail::set_group_rates(*optimizer_, rates_);
    stepped_ = false;
  }

  /// Undoes the step, before the caller throws an error on every rank.
  /// \param waits true if all ranks throw the same error: ranks then wait for each other, as one that ends early would be
  /// reported lost
  void undo_on_all(bool waits) {
    undo();
    try {
      gather_parameters();
      if (waits) gather_numbers();
    } catch (error const&) {
      // The caller throws the first error, which names the cause.
    }
  }

  /// The parameter of a tensor in the optimizer's groups; undefined for a tensor of no parameter.
  at::Tensor of_stepped(at::Tensor const& t) const { return share_ ? share_->parameter_of(t) : masters_.parameter_of(t); }
  error_context between() const { return {.rank = comm_->topology().global_rank}; }
  error_context here() const { return {comm_->topology().global_rank, -1, step_, "OPTIMIZER_STEP"}; }

  transport* comm_;
  rank_gradients* gradients_;
  trainer_options const* options_;
  step_parts* parts_;
  std::vector<named_parameter> parameters_;  // that this rank trains
  bool has_masters_;
  master_parameters masters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<optimizer_share> share_;
  optimizer_calls calls_;
  detail::copy_agreement copies_;
  step_names names_;
  step_policy policy_;

  long step_ = -1;
  double rate_ = 0;  // learning rate of this step
  bool pending_ = false;               // the gather is under way
  bool stepped_ = false;               // the optimizer stepped before the gather's end
  std::int64_t gradient_changes_ = 0;  // number of changes of gradients, when `run` returned
  std::vector<double> rates_;          // learning rates of this step, by group
  batch_data* data_ = nullptr;  // these and the next ones: parts of `parts_`
  batch_shapes* shapes_ = nullptr;
  stop_agreement* stop_ = nullptr;
  model_losses* losses_ = nullptr;
  model_norm* norm_ = nullptr;
  optimizer_snapshot before_;
};

}  // namespace chevron::detail
