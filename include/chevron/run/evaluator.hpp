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
#include <chevron/run/data_agreement.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/executor.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/preflight.hpp>
#include <chevron/run/trainer.hpp>
#include <chevron/run/transport.hpp>

/// \file
/// Running the model forward only: validation, sampling.

namespace chevron {

/// Runs a forward-only program over a trainer's stages, between its steps. No graph is built, and modules are in evaluation
/// meanwhile. Every rank makes the same calls; the trainer must outlive this.
///
///     chevron::evaluator evaluate(train);
///     double const held_out = evaluate.loss({tokens}, {next_tokens});
class evaluator {
 public:
  /// The forwards of the trainer's own program. Collective.
  /// \param micro_batches into how many batches are cut; 0: as many as in training, which is also the most
  explicit evaluator(trainer& owner, int micro_batches = 0) : evaluator(forwards_of(owner.program(), micro_batches), owner) {}

  /// Another program that only runs forward, with the trainer's stages on the trainer's ranks. Collective.
  evaluator(runnable steps, trainer& owner)
      : program_(std::move(steps)),
        owner_(&owner),
        with_loss_(checked(program_.view(), owner), owner.line(), owner.stages(), owner.loss(), hooks(owner)),
        without_loss_(program_.view(), owner.line(), owner.stages(), {}, hooks(owner)),
        data_(owner.data()) {
    collective_scope const doing(owner.line(), "making the evaluator");
    preflight_lines lines = common_lines(owner.line());
    lines.add(program_.view());
    compare(owner.line(), lines);
  }

  /// The mean loss over all samples of all replicas, or over what the trainer's `weigh` counts, on every rank.
  /// \param all what is counted over all replicas; 0: every replica has as much as this one
  double loss(batch const& whole, double all = 0) {
    owner_->settle();
    collective_scope const doing(owner_->line(), evaluating);
    lanes::scope const here(*owner_->on());
    batch_.split(owner_->on_device(whole), program_.view().plan.size.micro_batches);
    return loss_of_batch(all);
  }
  /// The same of microbatches that the caller has cut.
  double loss(std::vector<batch> const& micro_batches, double all = 0) {
    owner_->settle();
    collective_scope const doing(owner_->line(), evaluating);
    lanes::scope const here(*owner_->on());
    batch_.take(owner_->on_device(micro_batches), program_.view().plan.size.micro_batches);
    return loss_of_batch(all);
  }
  /// The same without extras.
  double loss(tensors const& inputs, tensors const& targets, double all = 0) { return loss(batch{inputs, targets}, all); }

  /// The last stage's outputs for these inputs, whole batch: on its rank; empty on the others. Those of microbatches are put
  /// together along dimension 0; of an output that is one number, there is one for each microbatch. An output that is undefined
  /// stays so.
  tensors outputs(batch const& whole_batch) {
    owner_->settle();
    collective_scope const doing(owner_->line(), evaluating);
    lanes::scope const here(*owner_->on());
    batch_.split(owner_->on_device(whole_batch), program_.view().plan.size.micro_batches);
    run(without_loss_);
    tensors whole;
    std::vector<tensors>& parts = without_loss_.outputs();
    for (std::size_t i = 0; i < parts.front().size(); ++i) {
      tensors of_one;
      for (tensors& part : parts) of_one.push_back(std::move(part[i]));
      whole.push_back(together(of_one, i));
    }
    for (tensors& part : parts) part.clear();
    return whole;
  }

  /// The same without extras.
  tensors outputs(tensors const& inputs) { return outputs(batch{inputs, {}}); }

 private:
  static constexpr char const* evaluating = "evaluate";

  double loss_of_batch(double all_counted) {
    owner_->weigh(batch_, all_counted);
    data_.begin();
    data_.add(batch_);
    run(with_loss_);
    std::vector<double> mine(1, 0.0);
    for (int m = 0; m < batch_.count(); ++m) {
      at::Tensor const& loss = with_loss_.losses()[static_cast<std::size_t>(m)];
      if (loss.defined() && !batch_.counts_nothing(m)) mine[0] += loss.item<double>() * batch_.weight(m);
    }
    std::span<double const> const data = data_.numbers();
    mine.insert(mine.end(), data.begin(), data.end());
    layout const& where = owner_->line().where();
    std::vector<double> all(static_cast<std::size_t>(where.world()) * mine.size());
    owner_->line().gather(mine, all);
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

  static executor_hooks hooks(trainer& owner) {
    executor_hooks out;
    out.autocast = owner.autocast();
    out.on = owner.on();
    return out;
  }

  static program forwards_of(program_view training, int micro_batches) {
    int const most = training.plan.size.micro_batches;
    if (micro_batches < 0 || micro_batches > most) {
      throw usage_error("evaluation in " + std::to_string(micro_batches) + " microbatches, but the trainer's program has " +
                        std::to_string(most) + ": give a number from 1 to " + std::to_string(most) +
                        ", 0 for as many, or a program of its own");
    }
    return lower(forward_part(training, micro_batches > 0 ? micro_batches : most));
  }

  static program_view checked(program_view p, trainer& owner) {
    if (!p.plan.forward_only) throw usage_error("evaluation needs a program that only runs forward");
    if (p.plan.size.ranks != owner.program().plan.size.ranks || p.plan.stages != owner.program().plan.stages) {
      throw usage_error("evaluation needs as many ranks and stages as training has");
    }
    for (int s = 0; s < p.plan.stages; ++s) {
      if (p.plan.rank_of_stage(s) != owner.program().plan.rank_of_stage(s)) {
        throw usage_error("stage " + std::to_string(s) + " is on another rank in evaluation than in training");
      }
    }
    return p;
  }

  void run(executor& with) {
    evaluation_scope const modules(owner_->stages());
    owner_->take_turn(with, batch_);
    with.run(batch_, owner_->next_step());
  }

  runnable program_;
  trainer* owner_;
  executor with_loss_;
  executor without_loss_;
  detail::data_agreement data_;
  split_batch batch_;
};

}  // namespace chevron
