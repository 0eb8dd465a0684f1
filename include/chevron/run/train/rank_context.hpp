#pragma once

#include <algorithm>
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
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/joint_calls.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/stage/data_agreement.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/build_stages.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/replica_counts.hpp>
#include <chevron/run/train/trainer_options.hpp>
#include <chevron/run/train/trainer_setup.hpp>

/// \file
/// The stages, streams and batches of a rank, which training and evaluation share.

namespace chevron::detail {

/// One rank's stages, loss, options and compute streams. A trainer owns a context, which its evaluators use between the
/// trainer's steps; an evaluator without a trainer owns a context of its own.
class rank_context {
 public:
  /// \param comm must outlive this object
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
  /// The stages by number; stages of other ranks are empty.
  std::vector<stage>& stages() { return stages_; }
  std::vector<stage> const& stages() const { return stages_; }
  /// The comparison of batches over the ranks of a pipeline, to be copied before its first use.
  detail::data_agreement const& data() const { return data_; }
  void data(detail::data_agreement common) { data_ = std::move(common); }
  /// Sets the counts of slots for messages that are in no program, such as gradients of tied parameters.
  void more_slots(slot_counts slots) { more_slots_ = slots; }

  /// Copies the tensors of a batch that this rank reads to its device. A copy from pinned memory runs in the background, so the
  /// caller must not write to the batch until the step is over. \returns the batch with the copies
  batch on_device(batch const& whole) const {
    if (!streams_->on_accelerator()) return whole;
    auto const brought = [&](at::Tensor const& t) { return t.defined() ? t.to(streams_->where(), /*non_blocking=*/true) : t; };
    batch out = whole;
    if (stages_.front()) std::transform(out.inputs.begin(), out.inputs.end(), out.inputs.begin(), brought);
    if (takes_targets_) std::transform(out.targets.begin(), out.targets.end(), out.targets.begin(), brought);
    for (side_input& e : out.side_inputs) e.value = brought(e.value);
    return out;
  }
  /// Copies microbatches that the caller has cut to this rank's device.
  std::vector<batch> on_device(std::vector<batch> const& micro_batches) const {
    if (!streams_->on_accelerator()) return micro_batches;
    std::vector<batch> out;
    for (batch const& one : micro_batches) out.push_back(on_device(one));
    return out;
  }

  /// Copies a batch to this rank's device, and cuts the batch into the plan's microbatches and slices.
  /// \param given a batch, or microbatches that the caller has cut
  template <class Given>
  void cut(Given const& given, plan_view const& plan, split_batch& into) {
    slicing_.slices = plan.size.slices;
    if constexpr (std::is_same_v<Given, batch>) {
      into.split(on_device(given), plan.size.micro_batches, slicing_);
    } else {
      into.take(on_device(given), plan.size.micro_batches, slicing_);
    }
  }

  /// The place of random numbers that functions of the batch draw: equal on all ranks of a pipeline.
  /// \param first number of the batch's first microbatch within the step
  rng_key batch_key(long step, int first) const {
    return {.seed = options_.seed,
            .step = step,
            .replica = comm_->topology().replica(),
            .stage = -1,
            .micro_batch = first,
            .use = random_use::batch};
  }
  /// Sets the weight of each microbatch in the model's loss, if this rank was given the tensors that are weighed.
  /// \throws usage_error if the rank of the first or the last stage was given neither input nor target
  void weigh(split_batch& cut) const {
    if (int const m = cut.first_not_given(); (stages_.front() || stages_.back()) && m < cut.count()) {
      throw usage_error("a step needs at least one input or target tensor on the ranks of the first and of the last stage, and " +
                        ("microbatch " + std::to_string(m)) + " has none. Remedy: inputs for stage 0, targets for the loss");
    }
    if (options_.loss_weight) return cut.weigh(options_.loss_weight, static_cast<bool>(stages_.back()));
    if (loss_ && !takes(loss_.side_input_names(), slice_start)) cut.check_labels(slicing_.slices);
  }
  /// As `weigh`, and sets the weight of each microbatch in the losses that this rank's stages declare.
  void weigh_all(split_batch& cut) const {
    weigh(cut);
    cut.weigh_losses(weights_, takes_targets_);
  }
  /// Sets each microbatch's share of the losses, unless totals must first be summed over replicas (`start_shares`,
  /// `finish_shares`).
  /// \param given the totals that the caller knows
  /// \throws usage_error if the total is known and 0
  void share_loss(split_batch& cut, step_total const& given) {
    weigh_all(cut);
    counts_.set(cut, losses_, given, comm_->topology().replicas);
    if (counts_.is_known()) counts_.share(cut);
  }
  /// Starts the sum of weights over replicas, if the total is not known. To be called after all checks that may refuse the step.
  void start_shares() {
    if (!counts_.is_known()) counts_.start(*comm_);
  }
  /// Waits for the sum over replicas, and sets the shares. To be called before a microbatch's share is read.
  void finish_shares(split_batch& cut) {
    if (counts_.is_known()) return;
    counts_.finish(*comm_);
    counts_.share(cut);
  }
  /// Runs the sum over replicas once, for a transport that connects at its first use.
  void connect_counts() {
    counts_.start(*comm_);
    counts_.finish(*comm_);
  }
  /// The totals over all replicas, once shares are set; NaN on a rank without the tensors that are weighed.
  detail::replica_counts const& all_counts() const { return counts_; }
  /// Makes the sum of weights over replicas, which a trainer's steps need.
  void count_with(collective_numbers& collectives) { counts_ = {streams_->where(), collectives.claim(), losses_.size()}; }
  /// The losses that this rank's stages declare, by stage; empty before `take`.
  std::vector<detail::rank_loss> const& stage_losses() const { return losses_; }
  /// Stores this rank's stages, by number; stages of other ranks are empty.
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
    if (takes(taken, slice_start)) slicing_.start_on = streams_->where();
  }

  /// Opens the transport for an executor's program and a batch's shapes, if program or shapes changed. To be called before each
  /// run.
  /// \param others_know_more whether ranks of a pipeline may notice different changes of shapes, since a rank may be given a
  /// part of the batch: all ranks then gather whether any rank noticed a change. Collective
  /// \throws usage_error if this rank has failed before; preflight_error, the same on every rank, if ranks that gather cut
  /// sequences at different tokens
  void open_for(executor& next, split_batch const& cut, bool others_know_more = true) {
    comm_->check_usable();
    shapes_.clear();
    cut.append_shapes(shapes_);
    bool const turn = !next.is_open();
    bool const changed = shapes_ != open_shapes_;
    // All ranks open together for another executor. Boundaries of the caller's are then compared.
    bool const gathers = turn ? slicing_.cuts && slicing_.slices > 1 : others_know_more;
    bool const notices = gathers ? on_any_rank(changed, cut.cuts_mark()) : changed;
    if (turn || notices) next.open(more_slots_);
    std::swap(shapes_, open_shapes_);
  }

 private:
  /// Whether the halves of a fused pair run at the same time: not if both halves may call collectives with other ranks, whose
  /// order must be equal on these ranks.
  bool runs_two() const {
    return (options_.overlap_pairs || !options_.device.is_cpu()) && !joint_calls(comm_->topology()).any();
  }
  static bool takes(std::vector<std::string> const& names, char const* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  /// Whether a flag is set on any rank of this pipeline. Collective. \param cuts `split_batch::cuts_mark` of this rank
  bool on_any_rank(bool here, double cuts) const {
    topology const& where = comm_->topology();
    double const mine[] = {here ? 1.0 : 0.0, cuts};
    std::vector<double> all(2 * static_cast<std::size_t>(where.world()));
    comm_->all_gather(mine, all);
    check_cuts(all);
    auto const first = all.begin() + 2 * where.rank_at(where.replica(), 0, 0);
    for (int r = 0; r < where.ranks_of_replica(); ++r) {
      if (first[2 * r] != 0) return true;
    }
    return false;
  }
  /// Compares the boundaries of slices over the ranks of each pipeline. \param all a flag and `cuts_mark` of each rank
  void check_cuts(std::vector<double> const& all) const {
    topology const& where = comm_->topology();
    auto const cuts = [&](int rank) { return all[2 * static_cast<std::size_t>(rank) + 1]; };
    for (int begin = 0, known = -1; begin < where.world(); begin += where.ranks_of_replica(), known = -1) {
      for (int r = begin; r < begin + where.ranks_of_replica(); ++r) {
        if (cuts(r) == 0) continue;
        if (known < 0) known = r;
        if (cuts(r) == cuts(known)) continue;
        throw preflight_error("trainer_options::slice_cuts cuts the sequences of ranks " + std::to_string(known) + " and " +
                                  std::to_string(r) +
                                  " at different tokens: inputs, messages and targets of a slice would be of different tokens. "
                                  "Remedy: boundaries that follow from tensors which all ranks are given, or one seed on all "
                                  "ranks",
                              naming({.rank = where.global_rank}, {known, r}));
      }
    }
  }

  transport* comm_;
  loss_function loss_;
  trainer_options options_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<stage> stages_;
  bool takes_targets_ = false;
  slicing slicing_;
  std::vector<detail::rank_loss> losses_;
  std::vector<loss_weight_function> weights_;  // of `losses_`
  detail::data_agreement data_;
  slot_counts more_slots_{};
  detail::replica_counts counts_;
  std::vector<std::int64_t> open_shapes_, shapes_;
};

}  // namespace chevron::detail
