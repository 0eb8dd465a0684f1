#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <chevron/lower/lower.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/stage/data_agreement.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/build_stages.hpp>
#include <chevron/run/train/preflight.hpp>
#include <chevron/run/train/rank_context.hpp>
#include <chevron/run/train/step_names.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/run/train/trainer_setup.hpp>

/// \file
/// Runs a model forward only, for validation and sampling.

namespace chevron {

namespace detail {

/// Puts all modules of some stages into evaluation mode while this object lives, and then restores each module's mode.
class evaluation_scope {
 public:
  /// \param stages must outlive this object
  explicit evaluation_scope(std::vector<stage>& stages) : stages_(stages) {
    for (stage& s : stages_) {
      before_.push_back(s.modes());
      s.training(false);
    }
  }
  ~evaluation_scope() {
    for (std::size_t s = 0; s < stages_.size(); ++s) stages_[s].set_modes(before_[s]);
  }
  evaluation_scope(evaluation_scope const&) = delete;
  evaluation_scope& operator=(evaluation_scope const&) = delete;

 private:
  std::vector<stage>& stages_;
  std::vector<std::vector<std::vector<bool>>> before_;
};

}  // namespace detail

/// The means of an evaluation, equal on all ranks.
struct evaluation_report {
  double loss = 0;                         ///< the model's loss, as `evaluator::loss` returns it
  std::vector<stage_loss_value> losses{};  ///< the losses that stages declare, by stage; not contained in `loss`
};

/// Runs a forward-only program on a model's stages: a trainer's stages, between the trainer's steps, or stages that the
/// evaluator builds, of a model that is not trained here. During a call no autograd graph is built, and modules are in
/// evaluation mode. Every rank must make the same calls.
///
///     chevron::evaluator evaluator(trainer);
///     double const held_out = evaluator.loss(tokens, next_tokens);
///
///     chevron::evaluator teacher({.program = program, .transport = comm, .stages = build_teacher});
///     auto const said = teacher.outputs(tokens);
class evaluator {
 public:
  /// Evaluates a trainer's model with the forwards of the trainer's program. Collective.
  /// \param owner must outlive this object
  /// \param micro_batches count of microbatches that a batch is cut into; 0: as many as in training, the most that are allowed
  /// \throws usage_error for more microbatches than in training
  explicit evaluator(trainer& owner, int micro_batches = 0) : evaluator(forwards_of(owner.program(), micro_batches), owner) {}

  /// Evaluates a trainer's model under a forward-only program, with each stage on the rank that trains it. Collective.
  /// \param owner must outlive this object
  /// \throws usage_error for a program that trains, or whose stages are on other ranks
  evaluator(proved_program program, trainer& owner)
      : evaluator(suited(program, owner.program()), &owner, {}, detail::trainer_access::context(owner)) {}

  /// Evaluates a model without a trainer. Calls may alternate with calls of trainers and evaluators on the same transport.
  /// Collective: ranks compare program and options, and replicas also parameters and buffers, as in a trainer's constructor.
  /// \throws preflight_error if ranks differ; usage_error for a program for another number of ranks
  explicit evaluator(evaluator_setup setup)
      : evaluator(setup,
                  std::make_shared<detail::rank_context>(setup.transport, std::move(setup.loss), std::move(setup.options))) {}

  /// Returns on every rank the mean loss over all samples of all replicas, or the mean weighted by `loss_weight`. Replicas may
  /// have batches of different sizes. Collective.
  /// \param whole this replica's batch
  /// \throws usage_error without a loss function, and if the weights of all microbatches are 0
  double loss(batch const& whole) { return report_of(whole, false).loss; }
  /// The mean loss of microbatches that the caller has cut.
  /// \param micro_batches as many as the program runs
  double loss(std::vector<batch> const& micro_batches) { return report_of(micro_batches, false).loss; }
  /// The mean loss of a batch without side inputs.
  double loss(tensors const& inputs, tensors const& targets) { return loss(batch{inputs, targets}); }
  /// The mean loss for one input and one target.
  double loss(at::Tensor const& input, at::Tensor const& target) { return loss(batch{{input}, {target}}); }

  /// Returns the mean loss, and the means of the losses that stages declare, weighted as in a trainer's step: the balance of
  /// experts or the prediction of later tokens on held-out data. Each rank with such a stage needs the tensors that the losses'
  /// weights read. Collective.
  /// \param whole this replica's batch
  /// \throws usage_error as `loss`, and for a declared loss that a forward in evaluation mode does not pass to `add_loss`
  evaluation_report report(batch const& whole) { return report_of(whole, true); }
  /// The means over microbatches that the caller has cut.
  /// \param micro_batches as many as the program runs
  evaluation_report report(std::vector<batch> const& micro_batches) { return report_of(micro_batches, true); }
  /// The means of a batch without side inputs.
  evaluation_report report(tensors const& inputs, tensors const& targets) { return report(batch{inputs, targets}); }
  /// The means for one input and one target.
  evaluation_report report(at::Tensor const& input, at::Tensor const& target) { return report(batch{{input}, {target}}); }

  /// Returns the last stage's outputs for a batch on that stage's rank; empty on all other ranks. Outputs of microbatches are
  /// concatenated along dimension 0, outputs of slices along dimension 1. For an output without dimensions, the result is a row
  /// of one number per microbatch or slice; an undefined output is undefined in the result. Collective.
  tensors outputs(batch const& whole) { return outputs_of(whole); }
  /// The outputs for microbatches that the caller has cut.
  /// \param micro_batches as many as the program runs
  tensors outputs(std::vector<batch> const& micro_batches) { return outputs_of(micro_batches); }
  /// The outputs for a batch without side inputs.
  tensors outputs(tensors const& inputs) { return outputs(batch{inputs, {}}); }
  /// The outputs for one input.
  tensors outputs(at::Tensor const& input) { return outputs(batch{{input}, {}}); }

  /// The stages by number; stages of other ranks are empty.
  std::vector<stage>& stages() { return context_->stages(); }
  transport& comm() const { return context_->comm(); }  ///< the trainer's transport, or that of `evaluator_setup`

 private:
  static constexpr char const* evaluating = "evaluate";

  evaluator(proved_program program, trainer* owner, std::shared_ptr<detail::rank_context> own, detail::rank_context& context)
      : program_(std::move(program)),
        owner_(owner),
        own_(std::move(own)),
        context_(&context),
        with_loss_(program_, comm(), stages(), context.loss(), settings(context)),
        without_loss_(program_, comm(), stages(), {}, settings(context)),
        data_(context.data()) {
    collective_scope const doing(comm(), "making the evaluator");
    named_values lines = common_values(comm());
    add_program(lines, program_.view());
    check_consistency(comm(), lines);
  }
  evaluator(evaluator_setup& setup, std::shared_ptr<detail::rank_context> own)
      : evaluator(build(setup, *own), nullptr, own, *own) {}

  /// Builds the stages of a model without a trainer, and compares the stages over the ranks. Collective.
  /// \returns the forward-only program to run
  static proved_program build(evaluator_setup const& setup, detail::rank_context& own) {
    transport& comm = own.comm();
    collective_scope const doing(comm, "making the evaluator");
    program_view const p = setup.program.view();
    detail::compute_streams::scope const here(*own.streams());
    detail::check_ranks(p, comm);
    detail::check(own.options(), comm.topology());
    own.take(detail::build_stages(p, setup.stages, comm, own.streams()->where(), false));
    detail::compare_ranks(comm, detail::lines_of(p, comm, own.options(), own.stages()));
    own.data(detail::data_agreement::gathered(p.plan, comm, detail::side_inputs_taken(own.stages(), own.loss()),
                                              own.options().check_data));
    return p.plan.forward_only ? setup.program : forwards_of(p, 0);
  }

  void synchronize() {
    if (owner_ != nullptr) owner_->synchronize();
  }
  long step() const { return owner_ != nullptr ? owner_->next_step() : 0; }

  template <class Given>
  tensors outputs_of(Given const& given) {
    synchronize();
    collective_scope const doing(comm(), evaluating);
    detail::compute_streams::scope const here(*context_->streams());
    context_->cut(given, program_.view().plan, batch_);
    data_.check_taken(batch_);
    std::vector<tensors>& parts = run(without_loss_).outputs;
    tensors whole;
    auto const slices = static_cast<std::size_t>(program_.view().plan.size.slices);
    for (std::size_t i = 0; i < parts.front().size(); ++i) {
      tensors of_one, of_slices;
      for (tensors& part : parts) {
        of_slices.push_back(std::move(part[i]));
        if (of_slices.size() < slices) continue;
        if (slices > 1 && of_slices[0].defined() && of_slices[0].dim() > 0) of_slices = {together(of_slices, i, 1)};
        of_one.insert(of_one.end(), of_slices.begin(), of_slices.end());
        of_slices.clear();
      }
      whole.push_back(together(of_one, i));
    }
    for (tensors& part : parts) part.clear();
    return whole;
  }

  /// \param of_stages whether losses that stages declare are evaluated, too
  template <class Given>
  evaluation_report report_of(Given const& given, bool of_stages) {
    if (!context_->loss()) throw usage_error("this evaluator has no loss function. Remedy: evaluator_setup::loss, or outputs()");
    synchronize();
    collective_scope const doing(comm(), evaluating);
    detail::compute_streams::scope const here(*context_->streams());
    {
      random_scope const draws(context_->batch_key(step(), 0));
      context_->cut(given, program_.view().plan, batch_);
      data_.check_taken(batch_);
      of_stages ? context_->weigh_all(batch_) : context_->weigh(batch_);
    }
    data_.begin();
    data_.add(batch_);
    detail::run_result const ran = run(with_loss_);
    tensors const& losses = ran.losses;
    auto const count = static_cast<std::size_t>(batch_.count());
    std::vector<double> mine(2 * count + 1, 0.0);  // on the last stage's rank: losses and weights, by microbatch, and all weights
    for (int m = 0; m < batch_.count(); ++m) {
      at::Tensor const& loss = losses[static_cast<std::size_t>(m)];
      if (!loss.defined() || batch_.counts_nothing(m)) continue;
      mine[static_cast<std::size_t>(m)] = loss.item<double>();
      mine[count + static_cast<std::size_t>(m)] = batch_.counts(m);
    }
    if (stages().back()) mine[2 * count] = batch_.counts();
    std::span<double const> const data = data_.numbers();
    mine.insert(mine.end(), data.begin(), data.end());
    std::size_t const declared = mine.size();
    if (of_stages) add_declared(ran, mine);
    topology const& where = comm().topology();
    std::vector<double> all(static_cast<std::size_t>(where.world()) * mine.size());
    comm().all_gather(mine, all);
    auto const of_rank = [&](int global_rank) { return all.data() + static_cast<std::size_t>(global_rank) * mine.size(); };
    data_.was_compared();
    if (!data.empty())
      data_.check([&](int r) { return of_rank(r) + 2 * count + 1; }, {where.global_rank, -1, step(), "evaluation"});
    evaluation_report out{.loss = mean_of(of_rank, count)};
    if (of_stages) out.losses = declared_means([&](int r) { return of_rank(r) + declared; }, count);
    return out;
  }

  /// Appends this rank's values and counts in the losses that its stages declare: for each loss the values by microbatch, then
  /// the counts; a count of -1 stands for a missing value. Ranks append equally many numbers.
  void add_declared(detail::run_result const& ran, std::vector<double>& numbers) {
    std::vector<detail::rank_loss> const& own = context_->stage_losses();
    plan_view const& plan = program_.view().plan;
    if (!names_) names_.emplace(plan, comm().topology(), detail::step_names::said(own).gather(comm()));
    auto const count = static_cast<std::size_t>(batch_.count());
    std::size_t next = numbers.size();
    numbers.resize(next + names_->most_losses(plan) * 2 * count);
    for (std::size_t k = 0; k < own.size(); ++k, next += 2 * count) {
      for (std::size_t m = 0; m < count; ++m) {
        int const number = static_cast<int>(m);
        double const counts = batch_.loss(k, number).counts;
        at::Tensor const& value = ran.stage_losses(own[k].stage, number)[own[k].index];
        numbers[next + count + m] = counts == 0 || value.defined() ? counts : -1;
        if (counts != 0 && value.defined()) numbers[next + m] = value.item<double>();
      }
    }
  }

  /// Computes the means of the losses that stages declare over all replicas, in the order of a trainer's step.
  /// \param of_rank returns the numbers of `add_declared` of a rank, given the global rank
  template <class OfRank>
  std::vector<stage_loss_value> declared_means(OfRank const& of_rank, std::size_t micro_batches) const {
    topology const& where = comm().topology();
    plan_view const& plan = program_.view().plan;
    std::vector<stage_loss_value> out;
    std::vector<std::size_t> next(static_cast<std::size_t>(plan.size.ranks));
    for (std::size_t s = 0; s < names_->losses.size(); ++s) {
      int const rank = plan.rank_of_stage(static_cast<int>(s));
      for (auto const& loss : names_->losses[s]) {
        std::size_t const place =
            std::exchange(next[static_cast<std::size_t>(rank)], next[static_cast<std::size_t>(rank)] + 2 * micro_batches);
        auto const refuse = [&](std::size_t m, char const* why) {
          throw usage_error(
              "loss `" + loss.name + "` of stage " + std::to_string(s) + ", microbatch " + std::to_string(m) + ": " + why,
              {where.global_rank, -1, step(), "evaluation"});
        };
        double total = 0;
        for (int replica = 0; replica < where.replicas; ++replica) {
          double const* const counts = of_rank(where.rank_at(replica, rank, 0)) + place + micro_batches;
          for (std::size_t m = 0; m < micro_batches; ++m) {
            if (std::isnan(counts[m]))
              refuse(m,
                     "the stage's rank was given no tensors to weigh. Remedy: give the rank inputs or targets; if the loss has "
                     "a weight, the tensors that the weight reads");
            if (counts[m] < 0)
              refuse(m,
                     "the forward gave no value in evaluation mode. Remedy: chevron::add_loss in this mode, too, or a weight "
                     "of 0");
            total += counts[m];
          }
        }
        double value = 0;
        for (int replica = 0; replica < where.replicas && total > 0; ++replica) {
          double const* const values = of_rank(where.rank_at(replica, rank, 0)) + place;
          double of_replica = 0;
          for (std::size_t m = 0; m < micro_batches; ++m) of_replica += values[m] * (values[micro_batches + m] / total);
          value += of_replica;
        }
        auto const same =
            std::find_if(out.begin(), out.end(), [&](stage_loss_value const& one) { return one.name == loss.name; });
        if (same != out.end()) {
          same->value += value;
        } else {
          out.push_back({loss.name, value, loss.factor});
        }
      }
    }
    return out;
  }

  /// Computes the mean loss over all replicas, with the same order of additions on all ranks.
  /// \param of_rank returns a rank's losses, then weights, by microbatch, then the sum of its weights, given the global rank
  template <class OfRank>
  double mean_of(OfRank const& of_rank, std::size_t micro_batches) {
    int const world = comm().topology().world();
    double counts = 0;
    int const shards = comm().topology().shards;  // all shards have equal losses: the first shard counts
    for (int r = 0; r < world; r += shards) counts += of_rank(r)[2 * micro_batches];
    if (!(counts > 0)) detail::refuse_empty_mean({comm().topology().global_rank, -1, step(), "evaluation"});
    double sum = 0;
    for (int r = 0; r < world; r += shards) {
      double of_replica = 0;
      for (std::size_t m = 0; m < micro_batches; ++m) of_replica += of_rank(r)[m] * (of_rank(r)[micro_batches + m] / counts);
      sum += of_replica;
    }
    return sum;
  }

  static at::Tensor together(tensors const& parts, std::size_t output, std::int64_t dimension = 0) {
    auto const defined =
        static_cast<std::size_t>(std::count_if(parts.begin(), parts.end(), [](at::Tensor const& t) { return t.defined(); }));
    if (defined == 0) return {};
    try {
      if (defined < parts.size()) throw usage_error("some are undefined");
      if (parts[0].dim() == 0) return at::stack(parts);
      return parts.size() == 1 ? parts[0] : at::cat(parts, dimension);
    } catch (std::exception const& e) {
      auto const* const of_torch = dynamic_cast<c10::Error const*>(&e);
      throw usage_error("output " + std::to_string(output) + " of the " + (dimension == 0 ? "microbatches" : "slices") +
                        " cannot be put together: " + (of_torch != nullptr ? of_torch->what_without_backtrace() : e.what()));
    }
  }

  static detail::executor_settings settings(detail::rank_context const& shared) {
    return {.autocast = shared.options().autocast, .streams = shared.streams()};
  }

  static proved_program forwards_of(program_view training, int micro_batches) {
    int const most = training.plan.size.micro_batches;
    if (micro_batches < 0 || micro_batches > most) {
      throw usage_error("evaluation in " + std::to_string(micro_batches) + " microbatches, but the trainer's program has " +
                        std::to_string(most) + ": give a number from 1 to " + std::to_string(most) +
                        ", 0 for as many, or a program of its own");
    }
    return lower(prove(forward_part(training, micro_batches > 0 ? micro_batches : most)));
  }

  static proved_program const& suited(proved_program const& given, program_view training) {
    program_view const p = given.view();
    if (!p.plan.forward_only) throw usage_error("evaluation needs a program that only runs forward");
    if (p.plan.size.ranks != training.plan.size.ranks || p.plan.stages != training.plan.stages) {
      throw usage_error("evaluation needs as many ranks and stages as training has");
    }
    for (int s = 0; s < p.plan.stages; ++s) {
      if (p.plan.rank_of_stage(s) != training.plan.rank_of_stage(s)) {
        throw usage_error("stage " + std::to_string(s) + " is on another rank in evaluation than in training");
      }
    }
    return given;
  }

  detail::run_result run(detail::executor& with) {
    detail::evaluation_scope const modules(stages());
    context_->open_for(with, batch_);
    with.begin(batch_, step());
    return with.finish();
  }

  proved_program program_;
  trainer* owner_;                             // null without a trainer
  std::shared_ptr<detail::rank_context> own_;  // null with a trainer
  detail::rank_context* context_;              // own_, or the trainer's
  detail::executor with_loss_;
  detail::executor without_loss_;
  detail::data_agreement data_;
  detail::split_batch batch_;
  std::optional<detail::step_names> names_;  // of the losses that all ranks' stages declare; empty before the first `report`
};

}  // namespace chevron
