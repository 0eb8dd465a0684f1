#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/plan/plan.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/data/data_agreement.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/execution/executor.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/trainer_options.hpp>
#include <chevron/run/training/build_stages.hpp>
#include <chevron/run/training/replica_counts.hpp>

/// \file
/// What training and evaluation share on a rank.

namespace chevron {

/// One rank's stages, and what they compute on and with. A trainer makes it, and its evaluators use it between the trainer's
/// steps; an evaluator without a trainer makes its own.
class rank_context {
 public:
  rank_context(transport& comm, loss_function loss, trainer_options options)
      : comm_(&comm),
        loss_(std::move(loss)),
        options_(std::move(options)),
        streams_(std::make_shared<compute_streams>(options_.device, runs_two(),
                                                   [&](at::Device where) { return comm.make_lane(where); })) {}

  transport& comm() const { return *comm_; }
  loss_function const& loss() const { return loss_; }
  trainer_options const& options() const { return options_; }
  std::shared_ptr<compute_streams> const& streams() const { return streams_; }
  /// By number; empty on other ranks.
  std::vector<stage>& stages() { return stages_; }
  std::vector<stage> const& stages() const { return stages_; }
  /// What the ranks of a pipeline use in common of a batch, nothing compared yet.
  detail::data_agreement const& data() const { return data_; }
  void data(detail::data_agreement common) { data_ = std::move(common); }
  /// Slots that messages outside all programs need, as those of tied parameters do.
  void more_slots(slot_counts slots) { more_slots_ = slots; }

  /// A batch with what this rank needs of it on its device. From pinned memory it is copied in the background: leave it alone
  /// until the step is over.
  batch on_device(batch const& whole) const {
    if (!streams_->on_accelerator()) return whole;
    auto const brought = [&](at::Tensor const& t) { return t.defined() ? t.to(streams_->where(), /*non_blocking=*/true) : t; };
    batch out = whole;
    if (stages_.front()) std::transform(out.inputs.begin(), out.inputs.end(), out.inputs.begin(), brought);
    if (takes_targets_) std::transform(out.targets.begin(), out.targets.end(), out.targets.begin(), brought);
    for (side_input& e : out.side_inputs) e.value = brought(e.value);
    return out;
  }
  std::vector<batch> on_device(std::vector<batch> const& micro_batches) const {
    if (!streams_->on_accelerator()) return micro_batches;
    std::vector<batch> out;
    for (batch const& one : micro_batches) out.push_back(on_device(one));
    return out;
  }

  /// Cuts a batch for a plan, with what this rank needs of it on its device.
  template <class Given>
  void cut(Given const& given, plan_view const& plan, split_batch& into) {
    slicing_.slices = plan.size.slices;
    if constexpr (std::is_same_v<Given, batch>) {
      into.split(on_device(given), plan.size.micro_batches, slicing_);
    } else {
      into.take(on_device(given), plan.size.micro_batches, slicing_);
    }
  }

  /// Says what each microbatch counts, as far as this rank was given what tells.
  /// \throws usage_error where the rank of the first or the last stage was given nothing
  void weigh(split_batch& cut) const {
    if (int const m = cut.first_not_given(); (stages_.front() || stages_.back()) && m < cut.count()) {
      throw usage_error("a step needs at least one input or target tensor on the ranks of the first and of the last stage, and " +
                        ("microbatch " + std::to_string(m)) + " has none. Remedy: inputs for stage 0, targets for the loss");
    }
    if (options_.loss_weight) cut.weigh(options_.loss_weight, static_cast<bool>(stages_.back()));
  }
  /// Gives each microbatch its share of the loss; where other replicas' counts are part of the total, `start_shares` and
  /// `finish_shares` do.
  /// \throws usage_error where they are known to count nothing
  void share_loss(split_batch& cut, step_total const& given) {
    weigh(cut);
    cut.weigh_losses(weights_, takes_targets_);
    counts_.set(cut, losses_, given, options_.reduction == gradient_reduction::mean ? comm_->topology().replicas : 1);
    if (counts_.is_known()) counts_.share(cut);
  }
  /// Starts to add up the replicas' counts, if the total is not known: when nothing can refuse the step any more.
  void start_shares() {
    if (!counts_.is_known()) counts_.start(*comm_);
  }
  /// Before a microbatch's weight is used. Waits for the other replicas.
  void finish_shares(split_batch& cut) {
    if (counts_.is_known()) return;
    counts_.finish(*comm_);
    counts_.share(cut);
  }
  /// Makes that sum once, for a transport that connects at its first use.
  void connect_counts() {
    counts_.start(*comm_);
    counts_.finish(*comm_);
  }
  /// What the microbatches of all replicas count, once shares are known; not a number where this rank was not given what tells.
  detail::replica_counts const& all_counts() const { return counts_; }
  /// The replicas' counts are a sum with this number.
  void count_with(int bucket) { counts_ = {streams_->where(), bucket, losses_.size()}; }
  /// The losses that this rank's stages declare, by stage; from `stages` on.
  std::vector<detail::rank_loss> const& stage_losses() const { return losses_; }
  /// Takes this rank's stages, by number; those of other ranks are empty.
  void take(std::vector<stage> stages) {
    stages_ = std::move(stages);
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      for (std::size_t k = 0; k < stages_[s].losses().size(); ++k) {
        losses_.push_back({stages_[s].losses()[k], static_cast<int>(s), k});
        weights_.push_back(losses_.back().weight);
      }
    }
    takes_targets_ = detail::takes_targets(stages_);
    std::vector<std::string> const taken = detail::side_inputs_taken(stages_, loss_);
    slicing_.cuts = options_.slice_cuts;
    if (std::find(taken.begin(), taken.end(), slice_start) != taken.end()) slicing_.start_on = streams_->where();
    count_with(0);
  }

  /// Before each run: opens the transport for this executor's program and this batch's shapes, where either changed.
  /// \param others_know_more ranks of a pipeline may have been given batches of which only some show that shapes changed: then
  /// they tell each other. Collective
  /// \throws usage_error if this rank has failed before
  void open_for(executor& next, split_batch const& cut, bool others_know_more = true) {
    comm_->check_usable();
    shapes_.clear();
    cut.append_shapes(shapes_);
    bool const turn = !next.is_open();
    bool const changed = shapes_ != open_shapes_;
    if (turn || (others_know_more ? on_any_rank(changed) : changed)) next.open(more_slots_);
    std::swap(shapes_, open_shapes_);
  }

 private:
  /// Whether the halves of a fused pair run beside each other: not where both may call collectives over shards, which have one
  /// order.
  bool runs_two() const { return (options_.overlap_pairs || !options_.device.is_cpu()) && comm_->topology().shards == 1; }
  /// Of this pipeline.
  bool on_any_rank(bool here) const {
    topology const& where = comm_->topology();
    double const mine = here ? 1 : 0;
    std::vector<double> all(static_cast<std::size_t>(where.world()));
    comm_->all_gather(std::span(&mine, 1), all);
    auto const first = all.begin() + where.rank_at(where.replica(), 0, 0);
    return std::any_of(first, first + where.ranks_of_replica(), [](double changed) { return changed != 0; });
  }

  transport* comm_;
  loss_function loss_;
  trainer_options options_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<stage> stages_;
  bool takes_targets_ = false;
  slicing slicing_;
  std::vector<detail::rank_loss> losses_;
  std::vector<loss_weight_function> weights_;  // of these
  detail::data_agreement data_;
  slot_counts more_slots_{};
  detail::replica_counts counts_;
  std::vector<std::int64_t> open_shapes_, shapes_;
};

}  // namespace chevron
