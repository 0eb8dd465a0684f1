#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
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
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/gradients.hpp>
#include <chevron/run/loss_scale.hpp>
#include <chevron/run/optimizer_snapshot.hpp>
#include <chevron/run/optimizer_state.hpp>
#include <chevron/run/preflight.hpp>
#include <chevron/run/transport.hpp>

/// \file
/// The end of a step: what all ranks must know before any of them may change a parameter, and then the change.

namespace chevron {

/// Makes the optimizer for one rank's parameters.
using optimizer_factory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

/// `optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-4))`
template <class Optimizer, class Options>
optimizer_factory optimizer(Options options) {
  return [options](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

/// What to do with a step whose loss or gradient is infinite or not a number.
enum class not_finite {
  stop,  ///< throw `numerical_error` on every rank; no parameter was changed
  skip   ///< leave parameters and optimizer as they are and go on
};

/// What becomes of the gradients of several replicas.
enum class over_replicas {
  mean,  ///< the gradient of the mean loss over all samples of all replicas
  sum    ///< each replica has the mean over its own samples, and these are added
};

struct update_options {
  double clip_grad_norm = 0;  ///< scale gradients so that their global norm is at most this; 0: never
  not_finite when_not_finite = not_finite::stop;
  std::function<double(long step)> learning_rate;  ///< empty: as the optimizer has it
  bool post_validation = false;                    ///< step before all ranks have been heard, and put it right afterwards
  int calm_steps = 10;                             ///< but only after so many steps in a row that nothing had to be put right in
  std::optional<loss_scaling> scaling = {};        ///< gradients come multiplied by `loss_factor`
  over_replicas sums = over_replicas::mean;
};

/// What every rank knows at the end of a step.
struct update_result {
  double loss = 0;         ///< mean over all samples, or what else microbatches count, of all replicas
  double grad_norm = 0;    ///< over all parameters, before clipping
  bool skipped = false;    ///< something was not finite, nothing was changed
  double loss_factor = 1;  ///< of loss scaling
  bool clipped = false;    ///< the norm was above the limit, gradients were scaled down
  double bubble = 0;       ///< share of ranks × longest rank's time in which ranks did not compute
  double learning_rate = 0;
  std::int64_t samples = 0;  ///< over all replicas
};

/// What a rank contributes to it.
struct update_input {
  std::span<double const> weighted_losses;  ///< by microbatch; zeros on ranks without the last stage
  double counts = 0;                        ///< what this replica's microbatches count
  double all_counts = 0;                    ///< the same over all replicas, as used for the weights
  std::int64_t samples = 0;                 ///< of this replica
  double busy_seconds = 0;
  double span_seconds = 0;
};

namespace detail {

/// Eight running sums, so that the order of additions is the same on every machine, whatever the number of threads.
template <class Scalar>
double sum_of_squares(Scalar const* values, std::int64_t count) {
  double lanes[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane)
      lanes[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// A number for people: `16`, `0.25`.
inline std::string plain(double value) {
  std::string text(32, '\0');
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), "%.10g", value)));
  return text;
}

}  // namespace detail

/// The squared norm of a gradient, in double, where the gradient is.
inline at::Tensor squared_norm(at::Tensor const& gradient) {
  return at::sum(at::square((gradient.is_complex() ? at::view_as_real(gradient) : gradient).to(at::kDouble)));
}

/// The same as a number.
inline double sum_of_squares(at::Tensor const& gradient) {
  if (gradient.is_cpu() && gradient.is_contiguous()) {
    if (gradient.scalar_type() == at::kFloat) return detail::sum_of_squares(gradient.const_data_ptr<float>(), gradient.numel());
    if (gradient.scalar_type() == at::kDouble) return detail::sum_of_squares(gradient.const_data_ptr<double>(), gradient.numel());
  }
  return squared_norm(gradient).item<double>();
}

/// The optimizer of one rank, with everything about a step that takes all ranks to decide.
///
/// One gather per step carries losses, squared norms per parameter and times. Every rank adds them up in the same
/// order (losses by replica and microbatch, norms by stage and registration), so all see the same numbers, bit for bit, and the
/// same as a model that is not cut at all; and all clip, skip or stop alike.
///
/// With post-validation (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4) a rank does not wait for the others: it
/// starts the gather, steps as if all gradients were finite and none to be clipped, and goes on with the next step. There it
/// asks for the `verdict`; a step that was wrong is undone from a snapshot and done as it should have been. A rank that can
/// tell from its own gradients that the step is wrong leaves it alone until then.
class global_update {
 public:
  /// Collective: ranks tell each other their parameters' names.
  /// \param gradients of this rank's stages, by stage number; null for the others. Must outlive this.
  /// \param sum_tied called when the replicas' sums are there: adds up the gradients of tied parameters
  global_update(plan_view plan, transport& line, std::vector<stage_gradients*> gradients, std::function<void()> sum_tied,
                optimizer_factory const& make, update_options options)
      : plan_(plan),
        line_(&line),
        gradients_(std::move(gradients)),
        sum_tied_(std::move(sum_tied)),
        options_(std::move(options)),
        names_(gradients_.size()) {
    if (options_.scaling) scale_ = loss_scale(*options_.scaling);
    std::string mine;
    std::vector<at::Tensor> parameters;
    for (std::size_t s = 0; s < gradients_.size(); ++s) {
      if (gradients_[s] == nullptr) continue;
      for (parameter const& p : gradients_[s]->trained()) {
        mine += std::to_string(s) + " " + p.name + "\n";
        // Two stages of this rank may share it: it is stepped once.
        bool const known =
            std::any_of(parameters.begin(), parameters.end(), [&](at::Tensor const& q) { return q.is_same(p.value); });
        if (!known) parameters.push_back(p.value);
      }
    }
    std::vector<std::string> const all = line.gather_text(mine);
    std::size_t most = 0;
    for (int r = 0; r < plan_.size.ranks; ++r) most = std::max(most, read_names(all[static_cast<std::size_t>(r)]));
    width_ = static_cast<std::size_t>(header + plan_.size.micro_batches) + most;
    mine_.resize(width_);
    all_.resize(width_ * static_cast<std::size_t>(line.where().world()));
    if (!parameters.empty()) {
      optimizer_ = make(std::move(parameters));
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
    contribute(input);
    if (!options_.post_validation || calm_ < options_.calm_steps) {
      line_->gather(mine_, all_);
      update_result const result = judge();
      apply(result);
      return result;
    }
    line_->start_gather(mine_);
    pending_ = true;
    stepped_ = false;
    note_rates(rates_);
    if (optimizer_ && !certainly_wrong()) {
      before_.take(*optimizer_);
      change(rate_);
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
    line_->finish_gather(all_);
    pending_ = false;
    update_result const result = [&] {
      try {
        return judge();
      } catch (numerical_error const&) {
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

  /// What the next loss is to be multiplied by before its backward.
  double loss_factor() const { return scale_.factor(); }
  /// For checkpoints.
  loss_scale& scaling() { return scale_; }

  /// Null on a rank without trained parameters.
  torch::optim::Optimizer* optimizer() { return optimizer_.get(); }

 private:
  static constexpr int header = 4;

  void check_optimizer() const {
    if (dynamic_cast<torch::optim::LBFGS const*>(optimizer_.get()) != nullptr) {
      throw usage_error("LBFGS wants the gradient several times in a step, and a step here computes it once. Remedy: SGD, Adam, AdamW, RMSprop or "
                        "Adagrad of torch::optim");
    }
    if (options_.post_validation && kind_of(*optimizer_).empty()) {
      throw usage_error("what this optimizer keeps is not known here, so a step of it cannot be undone. Remedy: SGD, Adam, AdamW, RMSprop or "
                        "Adagrad of torch::optim, or no post_validation");
    }
    if (!options_.learning_rate) return;
    std::vector<double> each;
    note_rates(each);
    for (double const rate : each) {
      if (rate == each[0]) continue;
      throw usage_error("the optimizer's groups have learning rates " + detail::plain(each[0]) + " and " + detail::plain(rate) +
                        ", and trainer_options::learning_rate would give all of them one. Remedy: one rate for all groups, or no such "
                        "function, and the rates set by hand before each step");
    }
  }

  /// Replicas of a stage must step alike. Collective.
  void compare_optimizers() {
    preflight_lines lines;
    if (optimizer_) {
      torch::optim::Optimizer const& mine = *optimizer_;
      std::string const kind = kind_of(mine);
      std::string each = kind.empty() ? typeid(mine).name() : kind;
      for (auto& group : optimizer_->param_groups())
        each += ", " + std::to_string(group.params().size()) + " parameters at " + detail::plain(group.options().get_lr());
      lines.add("the optimizer of pipeline rank " + std::to_string(line_->where().pipeline_rank()), each);
    }
    compare(*line_, lines);
  }

  void contribute(update_input const& input) {
    mine_[0] = input.counts;
    mine_[1] = input.busy_seconds;
    mine_[2] = input.span_seconds;
    mine_[3] = static_cast<double>(input.samples);
    std::copy(input.weighted_losses.begin(), input.weighted_losses.end(), mine_.begin() + header);
  }

  void add_own_norms() {
    std::fill(mine_.begin(), mine_.end(), 0.0);
    auto const waits_from = std::chrono::steady_clock::now();
    for (stage_gradients* g : gradients_) {
      if (g != nullptr) g->wait_sum(*line_);
    }
    sum_wait_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - waits_from).count();
    sum_tied_();
    if (scale_.factor() != 1) {
      for (stage_gradients* g : gradients_) {
        if (g != nullptr) g->scale(1 / scale_.factor());
      }
    }
    std::size_t at = first_norm();
    std::vector<at::Tensor> elsewhere;  // on an accelerator: all are asked for, then the host waits once
    std::vector<std::size_t> places;
    for (stage_gradients* g : gradients_) {
      if (g == nullptr) continue;
      for (std::size_t i = 0; i < g->views().size(); ++i, ++at) {
        at::Tensor const& gradient = g->views()[i];
        if (!g->counts_here(i)) continue;
        if (gradient.is_cpu()) {
          mine_[at] = sum_of_squares(gradient);
        } else {
          elsewhere.push_back(squared_norm(gradient));
          places.push_back(at);
        }
      }
    }
    if (!elsewhere.empty()) {
      at::Tensor const here = at::stack(elsewhere).cpu();
      for (std::size_t k = 0; k < places.size(); ++k) mine_[places[k]] = here.const_data_ptr<double>()[k];
    }
    note_roundings();
  }

  /// A gradient that fits single precision may be infinite where the optimizer sees it, in half precision. Where the norm is clipped to
  /// what half precision holds, it is not.
  void note_roundings() {
    std::size_t at = first_norm();
    for (stage_gradients* g : gradients_) {
      if (g == nullptr) continue;
      for (std::size_t i = 0; i < g->views().size(); ++i, ++at) {
        double const largest = g->largest(i);
        bool const clipped = options_.clip_grad_norm > 0 && options_.clip_grad_norm <= largest;
        // No element is larger than the norm: hardly ever is there anything to look at.
        if (clipped || !(mine_[at] > largest * largest) || !g->rounds_to_infinity(i)) continue;
        mine_[at] = std::numeric_limits<double>::infinity();
      }
    }
  }

  /// What all ranks' numbers say, the same on all of them.
  update_result judge() {
    check_counts();
    update_result result;
    std::string culprit;
    add_losses(result, culprit);
    bool const loss_is_finite = culprit.empty();
    add_norms(result, culprit);
    add_times(result);
    result.loss_factor = scale_.factor();
    bool const overflow = loss_is_finite && !culprit.empty() && scale_.can_back_off();
    scale_.step(!culprit.empty());
    for (int replica = 0; replica < line_->where().replicas; ++replica) {
      result.samples += static_cast<std::int64_t>(of_rank(replica * plan_.size.ranks)[3]);
    }
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
      for (stage_gradients* g : gradients_) {
        if (g != nullptr) g->scale(factor);
      }
    }
    if (optimizer_) change(result.learning_rate);
  }

  void change(double rate) {
    if (options_.learning_rate) {
      for (auto& group : optimizer_->param_groups()) group.options().set_lr(rate);
    }
    for (stage_gradients* g : gradients_) {
      if (g != nullptr) g->round();
    }
    optimizer_->step();
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

  /// All ranks find the same, but not at the same time: whoever left before the others had, they would take for lost.
  void wait_for_all() {
    try {
      line_->gather(mine_, all_);
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
    for (std::size_t i = header; i < mine_.size(); ++i) {
      if (!std::isfinite(mine_[i])) return true;
      if (i >= first_norm()) sum += mine_[i];
    }
    return options_.clip_grad_norm > 0 && std::sqrt(sum) > options_.clip_grad_norm * (1 + 1e-9);
  }

  double learning_rate() {
    if (options_.learning_rate) {
      double const rate = options_.learning_rate(step_);
      if (std::isfinite(rate)) return rate;
      throw usage_error("trainer_options::learning_rate gives " + detail::plain(rate) + " for this step: parameters would be lost", here());
    }
    return optimizer_ ? optimizer_->param_groups().front().options().get_lr() : 0;
  }

  std::size_t first_norm() const { return static_cast<std::size_t>(header + plan_.size.micro_batches); }
  place here() const { return {line_->where().global_rank, -1, step_, "OPTIMIZER_STEP"}; }

  std::size_t read_names(std::string const& text) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < text.size(); ++count) {
      std::size_t const space = text.find(' ', at), end = text.find('\n', at);
      names_[std::stoul(text.substr(at, space - at))].push_back(text.substr(space + 1, end - space - 1));
      at = end + 1;
    }
    return count;
  }

  double const* of_rank(int global_rank) const { return all_.data() + width_ * static_cast<std::size_t>(global_rank); }

  void check_counts() const {
    int const ranks = plan_.size.ranks;
    double sum = 0;
    std::string each;
    for (int replica = 0; replica < line_->where().replicas; ++replica) {
      double const counts = of_rank(replica * ranks)[0];
      sum += counts;
      each += (replica == 0 ? "" : ", ") + detail::plain(counts);
      for (int p = 1; p < ranks; ++p) {
        double const other = of_rank(replica * ranks + p)[0];
        if (other == counts) continue;
        throw usage_error("ranks " + std::to_string(replica * ranks) + " and " + std::to_string(replica * ranks + p) +
                              " were given batches that count " + detail::plain(counts) + " and " + detail::plain(other) +
                              " samples (or what else is weighed): all ranks of a pipeline take the same batch",
                          here());
      }
    }
    bool const together = options_.sums == over_replicas::mean;
    if (!together) sum = of_rank(line_->where().replica() * ranks)[0];
    if (std::abs(sum - all_counts_) > 1e-9 * all_counts_) {
      throw usage_error(
          (together ? "the replicas' batches count " + each : "this replica's batches count " + detail::plain(sum)) +
              " samples (or what else is weighed), but each was taken for a share of " + detail::plain(all_counts_) +
              ": give step() what they count" + (together ? " over all replicas" : "") + ", accumulated batches included",
          here());
    }
  }

  void add_losses(update_result& result, std::string& culprit) const {
    int const rank = plan_.rank_of_stage(plan_.stages - 1);
    for (int replica = 0; replica < line_->where().replicas; ++replica) {
      for (int m = 0; m < plan_.size.micro_batches; ++m) {
        double const loss = of_rank(replica * plan_.size.ranks + rank)[header + m];
        if (culprit.empty() && !std::isfinite(loss)) {
          culprit = "the loss of microbatch " + std::to_string(m);
          if (line_->where().replicas > 1) culprit += " of replica " + std::to_string(replica);
        }
        result.loss += loss;
      }
    }
  }

  void add_norms(update_result& result, std::string& culprit) const {
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks), first_norm());
    double sum = 0;
    for (std::size_t s = 0; s < names_.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      for (std::string const& name : names_[s]) {
        double const squared = of_rank(rank)[next[static_cast<std::size_t>(rank)]++];
        if (culprit.empty() && !std::isfinite(squared)) culprit = "the gradient of stage " + std::to_string(s) + "'s " + name;
        sum += squared;
      }
    }
    result.grad_norm = std::sqrt(sum);
  }

  void add_times(update_result& result) const {
    double busy = 0, longest = 0;
    int const world = line_->where().world();
    for (int r = 0; r < world; ++r) {
      busy += of_rank(r)[1];
      longest = std::max(longest, of_rank(r)[2]);
    }
    result.bubble = longest > 0 ? 1 - busy / (world * longest) : 0;
  }

  plan_view plan_;
  transport* line_;
  std::vector<stage_gradients*> gradients_;
  std::function<void()> sum_tied_;
  update_options options_;
  std::vector<std::vector<std::string>> names_;  // of all trained parameters, by stage
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::size_t width_ = 0;
  std::vector<double> mine_, all_;

  long step_ = -1;
  double all_counts_ = 0;
  loss_scale scale_;
  int calm_ = 0;  // steps in a row that were neither skipped nor clipped
  double sum_wait_ = 0;
  bool pending_ = false;  // the gather is under way
  bool stepped_ = false;  // the optimizer stepped without waiting for it
  double rate_ = 0;                            // of this step
  std::vector<double> rates_, rates_of_next_;  // by group, of the pending step
  optimizer_snapshot before_;
};

}  // namespace chevron
