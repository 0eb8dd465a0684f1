#pragma once
// long: one protocol: the early step, its verdict and its undoing are read together

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/consistency.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>
#include <chevron/run/optimizer/gradient_norm.hpp>
#include <chevron/run/optimizer/loss_scale.hpp>
#include <chevron/run/optimizer/optimizer_snapshot.hpp>
#include <chevron/run/optimizer/optimizer_state.hpp>
#include <chevron/run/optimizer/step_options.hpp>
#include <chevron/run/optimizer/step_statistics.hpp>

/// \file
/// The end of a step: what all ranks must know before any of them may change a parameter, and then the change.

namespace chevron {

/// The optimizer of one rank, with everything about a step that takes all ranks to decide.
///
/// All ranks see the same numbers (step_statistics.hpp), so all clip, skip or stop alike.
///
/// With post-validation (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4) a rank does not wait for the others: it
/// starts the gather, steps as if all gradients were finite and none to be clipped, and goes on with the next step. There it
/// asks for the `verdict`; a step that was wrong is undone from a snapshot and done as it should have been. A rank that can
/// tell from its own gradients that the step is wrong leaves it alone until then.
class global_step {
 public:
  /// Collective: ranks tell each other their parameters' names.
  /// \param gradients of this rank's stages, by stage number; null for the others. Must outlive this.
  /// \param taken what this rank's stages take of a batch by name
  /// \param sum_tied called when the replicas' sums are there: adds up the gradients of tied parameters
  global_step(plan_view plan, transport& comm, std::vector<gradient_buckets*> gradients, std::vector<std::string> const& taken,
              std::function<void()> sum_tied, optimizer_factory const& make, update_options options)
      : comm_(&comm), gradients_(std::move(gradients)), sum_tied_(std::move(sum_tied)), options_(std::move(options)) {
    if (options_.scaling) scale_ = loss_scale(*options_.scaling);
    std::string mine;
    for (std::size_t s = 0; s < gradients_.size(); ++s) {
      if (gradients_[s] == nullptr) continue;
      for (parameter const& p : gradients_[s]->trained()) {
        mine += std::to_string(s) + " " + p.name + "\n";
        // Two stages of this rank may share it: it is stepped once.
        bool const known = std::any_of(parameters_.begin(), parameters_.end(),
                                       [&](named_parameter const& q) { return q.value.is_same(p.value); });
        if (!known) parameters_.push_back({static_cast<int>(s), p.name, p.value});
      }
    }
    for (std::string const& name : taken) mine += "takes " + name + "\n";
    numbers_.emplace(plan, comm, mine, options_.check_data);
    if (!parameters_.empty()) {
      optimizer_ = make(parameters_);
      if (!optimizer_) throw usage_error("the optimizer factory gave no optimizer");
      check_optimizer();
    }
    compare_optimizers();
  }

  /// Waits for the replicas' sums, then decides and steps. Collective. With post-validation it may give nothing: then the step
  /// is `pending`, and `verdict` is to be called before the gradients are written to again.
  /// \param settle called when the gradients are there, also where they were only asked for before: completes the input
  template <class Settle>
  std::optional<update_result> run(long step, update_input const& input, Settle const& settle) {
    step_ = step;
    rate_ = learning_rate();
    all_counts_ = input.all_counts;
    add_own_norms();
    settle();
    numbers_->set(input);
    if (!options_.post_validation || calm_ < options_.stable_steps) {
      gather_numbers();
      update_result const result = judge();
      apply(result);
      return result;
    }
    numbers_->start_all_gather();
    pending_ = true;
    stepped_ = false;
    note_rates(rates_);
    if (optimizer_ && !certainly_wrong()) {
      before_.take(*optimizer_);
      set_up(rate_);
      optimizer_->step();
      stepped_ = true;
    }
    return {};
  }

  bool pending() const { return pending_; }

  /// Seconds that the last step waited for the replicas' sums.
  double sum_wait() const { return sum_wait_; }

  /// What came of the pending step, now put right. Collective.
  /// \param stands false: parameters are now others than they were since `run`, on this rank or on others
  update_result verdict(bool& stands) {
    numbers_->finish_all_gather();
    pending_ = false;
    update_result const result = [&] {
      try {
        return judge();
      } catch (numerical_error const&) {
        undo();
        wait_for_all();
        throw;
      } catch (preflight_error const&) {
        undo();
        wait_for_all();
        throw;
      } catch (...) {
        undo();
        throw;
      }
    }();
    stands = !result.skipped && !result.clipped;
    if (!stands) {
      // The caller may have set other learning rates since, for the step to come.
      note_rates(rates_of_next_);
      undo();
      set_rates(rates_);
      apply(result);
      if (!options_.learning_rate) set_rates(rates_of_next_);
    }
    return result;
  }

  /// What the ranks of a pipeline use in common of a batch.
  detail::data_agreement const& data() const { return numbers_->data(); }

  /// What the next loss is to be multiplied by before its backward.
  double loss_factor() const { return scale_.factor(); }
  /// For checkpoints.
  loss_scale& scaling() { return scale_; }

  /// Null on a rank without trained parameters.
  torch::optim::Optimizer* optimizer() { return optimizer_.get(); }

 private:
  void check_optimizer() const {
    if (dynamic_cast<torch::optim::LBFGS const*>(optimizer_.get()) != nullptr) {
      throw usage_error(
          "LBFGS wants the gradient several times in a step, and a step here computes it once. Remedy: SGD, Adam, AdamW, RMSprop "
          "or "
          "Adagrad of torch::optim");
    }
    if (options_.post_validation && kind_of(*optimizer_).empty()) {
      throw usage_error(
          "what this optimizer keeps is not known here, so a step of it cannot be undone. Remedy: SGD, Adam, AdamW, RMSprop or "
          "Adagrad of torch::optim, or no post_validation");
    }
    if (!options_.learning_rate) return;
    std::vector<double> each;
    note_rates(each);
    for (double const rate : each) {
      if (rate == each[0]) continue;
      throw usage_error(
          "the optimizer's groups have learning rates " + detail::plain(each[0]) + " and " + detail::plain(rate) +
          ", and trainer_options::learning_rate would give all of them one. Remedy: one rate for all groups, or no such "
          "function, and the rates set by hand before each step");
    }
  }

  /// Replicas of a stage must step alike. Collective.
  void compare_optimizers() {
    named_values lines;
    if (optimizer_) {
      torch::optim::Optimizer const& mine = *optimizer_;
      std::string const kind = kind_of(mine);
      std::string each = kind.empty() ? typeid(mine).name() : kind;
      for (auto& group : optimizer_->param_groups())
        each += ", " + std::to_string(group.params().size()) + " parameters at " + detail::plain(group.options().get_lr());
      lines.add("the optimizer of pipeline rank " + std::to_string(comm_->topology().pipeline_rank()), each);
    }
    check_consistency(*comm_, lines);
  }

  void add_own_norms() {
    numbers_->clear();
    auto const waits_from = std::chrono::steady_clock::now();
    for (gradient_buckets* g : gradients_) {
      if (g != nullptr) g->wait_all_reduce(*comm_);
    }
    sum_wait_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - waits_from).count();
    sum_tied_();
    if (scale_.factor() != 1) {
      for (gradient_buckets* g : gradients_) {
        if (g != nullptr) g->scale(1 / scale_.factor());
      }
    }
    std::span<double> const norms = numbers_->norms();
    std::size_t at = 0;
    std::vector<at::Tensor> elsewhere;  // on an accelerator: all are asked for, then the host waits once
    std::vector<std::size_t> places;
    for (gradient_buckets* g : gradients_) {
      if (g == nullptr) continue;
      for (std::size_t i = 0; i < g->views().size(); ++i, ++at) {
        at::Tensor const& gradient = g->views()[i];
        if (!g->counts_here(i)) continue;
        if (gradient.is_cpu()) {
          norms[at] = sum_of_squares(gradient);
        } else {
          elsewhere.push_back(squared_norm(gradient));
          places.push_back(at);
        }
      }
    }
    if (!elsewhere.empty()) {
      at::Tensor const here = at::stack(elsewhere).cpu();
      for (std::size_t k = 0; k < places.size(); ++k) norms[places[k]] = here.const_data_ptr<double>()[k];
    }
    note_roundings();
  }

  /// A gradient that fits single precision may be infinite where the optimizer sees it, in half precision. Where the norm is
  /// clipped to what half precision holds, it is not.
  void note_roundings() {
    std::span<double> const norms = numbers_->norms();
    std::size_t at = 0;
    for (gradient_buckets* g : gradients_) {
      if (g == nullptr) continue;
      for (std::size_t i = 0; i < g->views().size(); ++i, ++at) {
        double const largest = g->largest(i);
        bool const clipped = options_.clip_grad_norm > 0 && options_.clip_grad_norm <= largest;
        // No element is larger than the norm: hardly ever is there anything to look at.
        if (clipped || !(norms[at] > largest * largest) || !g->rounds_to_infinity(i)) continue;
        norms[at] = std::numeric_limits<double>::infinity();
      }
    }
  }

  /// What all ranks' numbers say, the same on all of them.
  update_result judge() {
    numbers_->check_counts(options_.reduction, all_counts_, here());
    numbers_->check_data(here());
    update_result result;
    std::string culprit;
    numbers_->add_losses(result, culprit);
    bool const loss_is_finite = culprit.empty();
    numbers_->add_norms(result, culprit);
    numbers_->add_times(result);
    result.loss_factor = scale_.factor();
    bool const overflow = loss_is_finite && !culprit.empty() && scale_.can_back_off();
    scale_.step(!culprit.empty());
    result.samples = numbers_->samples();
    result.learning_rate = rate_;
    result.skipped = !culprit.empty();
    result.clipped = !result.skipped && options_.clip_grad_norm > 0 && result.grad_norm > options_.clip_grad_norm;
    calm_ = result.skipped || result.clipped ? 0 : calm_ + 1;
    if (result.skipped && !overflow && options_.when_not_finite == not_finite::stop) {
      throw numerical_error(culprit + " is not finite; no parameter was changed", here());
    }
    return result;
  }

  void apply(update_result const& result) {
    if (result.skipped) return;
    if (result.clipped) {
      double const factor = options_.clip_grad_norm / (result.grad_norm + 1e-6);
      for (gradient_buckets* g : gradients_) {
        if (g != nullptr) g->scale(factor);
      }
    }
    if (optimizer_) set_up(result.learning_rate);
    if (options_.before_optimizer_step)
      options_.before_optimizer_step({step_, result.loss, result.grad_norm, result.learning_rate, parameters_});
    if (optimizer_) optimizer_->step();
  }

  /// Everything about the optimizer's step but the step.
  void set_up(double rate) {
    if (options_.learning_rate) {
      for (auto& group : optimizer_->param_groups()) group.options().set_lr(rate);
    }
    for (gradient_buckets* g : gradients_) {
      if (g != nullptr) g->round();
    }
  }

  /// By group of the optimizer.
  void note_rates(std::vector<double>& out) const {
    out.clear();
    if (!optimizer_) return;
    for (auto const& group : optimizer_->param_groups()) out.push_back(group.options().get_lr());
  }
  void set_rates(std::vector<double> const& rates) {
    for (std::size_t g = 0; g < rates.size(); ++g) optimizer_->param_groups()[g].options().set_lr(rates[g]);
  }

  void gather_numbers() {
    collective_scope const doing(*comm_, "norm of the gradient");
    numbers_->all_gather();
  }

  /// Barrier before an error is thrown. Every rank throws the same one; a rank that ended first would be reported as lost.
  void wait_for_all() {
    try {
      gather_numbers();
    } catch (error const&) {
      // Then there is nobody to wait for.
    }
  }

  void undo() {
    if (stepped_) before_.put_back(*optimizer_);
    stepped_ = false;
  }

  /// Do this rank's numbers alone make all of them not finite, or too large? Sums in another order differ by less than the
  /// margin.
  bool certainly_wrong() const {
    double sum = 0;
    for (double const loss : std::as_const(*numbers_).losses()) {
      if (!std::isfinite(loss)) return true;
    }
    for (double const squared : std::as_const(*numbers_).norms()) {
      if (!std::isfinite(squared)) return true;
      sum += squared;
    }
    return options_.clip_grad_norm > 0 && std::sqrt(sum) > options_.clip_grad_norm * (1 + 1e-9);
  }

  double learning_rate() {
    if (options_.learning_rate) {
      double const rate = options_.learning_rate(step_);
      if (std::isfinite(rate)) return rate;
      throw usage_error(
          "trainer_options::learning_rate gives " + detail::plain(rate) + " for this step: parameters would be lost", here());
    }
    return optimizer_ ? optimizer_->param_groups().front().options().get_lr() : 0;
  }

  error_context here() const { return {comm_->topology().global_rank, -1, step_, "OPTIMIZER_STEP"}; }

  transport* comm_;
  std::vector<gradient_buckets*> gradients_;
  std::function<void()> sum_tied_;
  update_options options_;
  std::vector<named_parameter> parameters_;  // trained on this rank
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<detail::step_statistics> numbers_;

  long step_ = -1;
  double all_counts_ = 0;
  loss_scale scale_;
  int calm_ = 0;  // steps in a row that were neither skipped nor clipped
  double sum_wait_ = 0;
  bool pending_ = false;                       // the gather is under way
  bool stepped_ = false;                       // the optimizer stepped without waiting for it
  double rate_ = 0;                            // of this step
  std::vector<double> rates_, rates_of_next_;  // by group, of the pending step
  optimizer_snapshot before_;
};

}  // namespace chevron
