#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
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
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/data_agreement.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/execution/executor.hpp>
#include <chevron/run/training/preflight.hpp>
#include <chevron/run/training/rank_context.hpp>
#include <chevron/run/training/trainer.hpp>

/// \file
/// Running the model forward only: validation, sampling.

namespace chevron {

/// Runs a forward-only program over a trainer's stages, between its steps. No graph is built, and modules are in evaluation
/// meanwhile. Every rank makes the same calls; the trainer must outlive this.
///
///     chevron::evaluator evaluator(trainer);
///     double const held_out = evaluator.loss(tokens, next_tokens);
class evaluator {
 public:
  /// The forwards of the trainer's own program. Collective.
  /// \param micro_batches into how many batches are cut; 0: as many as in training, which is also the most
  explicit evaluator(trainer& owner, int micro_batches = 0) : evaluator(forwards_of(owner.program(), micro_batches), owner) {}

  /// Another program that only runs forward, with the trainer's stages on the trainer's ranks. Collective.
  evaluator(proved_program program, trainer& owner)
      : program_(std::move(program)),
        owner_(&owner),
        context_(&owner.context()),
        with_loss_(suited(program_, owner), owner.comm(), owner.stages(), context_->loss(), settings(*context_)),
        without_loss_(program_, owner.comm(), owner.stages(), {}, settings(*context_)),
        data_(context_->data()) {
    collective_scope const doing(owner.comm(), "making the evaluator");
    named_values lines = common_values(owner.comm());
    add_program(lines, program_.view());
    check_consistency(owner.comm(), lines);
  }

  /// The mean loss over all samples of all replicas, or over what the trainer's `loss_weight` counts, on every rank.
  /// \param whole this replica's batch
  /// \param global_weight what is counted over all replicas; 0: every replica has as much as this one
  double loss(batch const& whole, double global_weight = 0) {
    owner_->synchronize();
    collective_scope const doing(owner_->comm(), evaluating);
    compute_streams::scope const here(*context_->streams());
    batch_.split(context_->on_device(whole), program_.view().plan.size.micro_batches);
    return loss_of_batch(global_weight);
  }
  /// The same of microbatches that the caller has cut.
  double loss(std::vector<batch> const& micro_batches, double global_weight = 0) {
    owner_->synchronize();
    collective_scope const doing(owner_->comm(), evaluating);
    compute_streams::scope const here(*context_->streams());
    batch_.take(context_->on_device(micro_batches), program_.view().plan.size.micro_batches);
    return loss_of_batch(global_weight);
  }
  /// The same without side inputs.
  double loss(tensors const& inputs, tensors const& targets, double global_weight = 0) {
    return loss(batch{inputs, targets}, global_weight);
  }
  /// The same of one input and one target.
  double loss(at::Tensor const& input, at::Tensor const& target, double global_weight = 0) {
    return loss(batch{{input}, {target}}, global_weight);
  }

  /// The last stage's outputs for these inputs, whole batch: on its rank; empty on the others. Those of microbatches are put
  /// together along dimension 0; of an output that is one number, there is one for each microbatch. An output that is undefined
  /// stays so.
  tensors outputs(batch const& whole_batch) {
    owner_->synchronize();
    collective_scope const doing(owner_->comm(), evaluating);
    compute_streams::scope const here(*context_->streams());
    batch_.split(context_->on_device(whole_batch), program_.view().plan.size.micro_batches);
    std::vector<tensors>& parts = run(without_loss_).outputs;
    tensors whole;
    for (std::size_t i = 0; i < parts.front().size(); ++i) {
      tensors of_one;
      for (tensors& part : parts) of_one.push_back(std::move(part[i]));
      whole.push_back(together(of_one, i));
    }
    for (tensors& part : parts) part.clear();
    return whole;
  }

  /// The same without side inputs.
  tensors outputs(tensors const& inputs) { return outputs(batch{inputs, {}}); }
  tensors outputs(at::Tensor const& input) { return outputs(batch{{input}, {}}); }

 private:
  static constexpr char const* evaluating = "evaluate";

  double loss_of_batch(double global_weight) {
    context_->share_loss(batch_, global_weight);
    data_.begin();
    data_.add(batch_);
    tensors const& losses = run(with_loss_).losses;
    std::vector<double> mine(1, 0.0);
    for (int m = 0; m < batch_.count(); ++m) {
      at::Tensor const& loss = losses[static_cast<std::size_t>(m)];
      if (loss.defined() && !batch_.counts_nothing(m)) mine[0] += loss.item<double>() * batch_.weight(m);
    }
    std::span<double const> const data = data_.numbers();
    mine.insert(mine.end(), data.begin(), data.end());
    topology const& where = owner_->comm().topology();
    std::vector<double> all(static_cast<std::size_t>(where.world()) * mine.size());
    owner_->comm().all_gather(mine, all);
    auto const of_rank = [&](int global_rank) { return all.data() + static_cast<std::size_t>(global_rank) * mine.size(); };
    if (!data.empty()) {
      data_.was_compared();
      data_.check([&](int r) { return of_rank(r) + 1; }, {where.global_rank, -1, owner_->next_step(), "evaluation"});
    }
    double sum = 0;
    for (int r = 0; r < where.world(); ++r) sum += of_rank(r)[0];
    return sum;
  }

  static at::Tensor together(tensors const& parts, std::size_t output) {
    auto const defined =
        static_cast<std::size_t>(std::count_if(parts.begin(), parts.end(), [](at::Tensor const& t) { return t.defined(); }));
    if (defined == 0) return {};
    try {
      if (defined < parts.size()) throw usage_error("some are undefined");
      if (parts[0].dim() == 0) return at::stack(parts);
      return parts.size() == 1 ? parts[0] : at::cat(parts);
    } catch (std::exception const& e) {
      auto const* const of_torch = dynamic_cast<c10::Error const*>(&e);
      throw usage_error("output " + std::to_string(output) + " of the microbatches cannot be put together: " +
                        (of_torch != nullptr ? of_torch->what_without_backtrace() : e.what()));
    }
  }

  static executor_settings settings(rank_context const& shared) {
    return {.autocast = shared.options().autocast, .streams = shared.streams(), .check_messages = shared.options().check_messages};
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

  static proved_program const& suited(proved_program const& given, trainer& owner) {
    program_view const p = given.view();
    if (!p.plan.forward_only) throw usage_error("evaluation needs a program that only runs forward");
    if (p.plan.size.ranks != owner.program().plan.size.ranks || p.plan.stages != owner.program().plan.stages) {
      throw usage_error("evaluation needs as many ranks and stages as training has");
    }
    for (int s = 0; s < p.plan.stages; ++s) {
      if (p.plan.rank_of_stage(s) != owner.program().plan.rank_of_stage(s)) {
        throw usage_error("stage " + std::to_string(s) + " is on another rank in evaluation than in training");
      }
    }
    return given;
  }

  run_result run(executor& with) {
    evaluation_scope const modules(owner_->stages());
    context_->open_for(with, batch_);
    return with.run(batch_, owner_->next_step());
  }

  proved_program program_;
  trainer* owner_;
  rank_context* context_;  // of owner_
  executor with_loss_;
  executor without_loss_;
  detail::data_agreement data_;
  split_batch batch_;
};

}  // namespace chevron
