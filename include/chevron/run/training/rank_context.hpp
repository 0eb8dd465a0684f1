#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

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

/// \file
/// What training and evaluation share on a rank.

namespace chevron {

/// One rank's stages, what they compute on and with, and whose program its transport is open for. A trainer makes it; its
/// evaluators use it between the trainer's steps.
class rank_context {
 public:
  rank_context(transport& comm, loss_function loss, trainer_options options)
      : comm_(&comm),
        loss_(std::move(loss)),
        options_(std::move(options)),
        streams_(std::make_shared<compute_streams>(options_.device, options_.overlap_pairs || !options_.device.is_cpu())) {}

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
    if (stages_.back()) std::transform(out.targets.begin(), out.targets.end(), out.targets.begin(), brought);
    for (side_input& e : out.side_inputs) e.value = brought(e.value);
    return out;
  }
  std::vector<batch> on_device(std::vector<batch> const& micro_batches) const {
    if (!streams_->on_accelerator()) return micro_batches;
    std::vector<batch> out;
    for (batch const& one : micro_batches) out.push_back(on_device(one));
    return out;
  }

  /// Gives each microbatch its share of the loss.
  /// \param global_weight what microbatches count over all replicas; 0: every replica has as much as this one
  /// \returns what they count over all replicas; 0 where this rank was not given what tells
  /// \throws usage_error where they count nothing, or the rank of the first or the last stage was given nothing
  double share_loss(split_batch& cut, double global_weight) const {
    if (int const m = cut.first_not_given(); (stages_.front() || stages_.back()) && m < cut.count()) {
      throw usage_error("a step needs at least one input or target tensor on the ranks of the first and of the last stage, and " +
                        ("microbatch " + std::to_string(m)) + " has none. Remedy: inputs for stage 0, targets for the loss");
    }
    if (options_.loss_weight) cut.weigh(options_.loss_weight, static_cast<bool>(stages_.back()));
    bool const known = !std::isnan(cut.counts());
    if (!(global_weight > 0))
      global_weight =
          known ? cut.counts() * (options_.reduction == gradient_reduction::mean ? comm_->topology().replicas : 1) : 0;
    if (known && !(global_weight > 0)) throw usage_error("the microbatches of this step count nothing: there is no mean loss");
    cut.share(global_weight);
    return global_weight;
  }

  /// Before each run: opens the transport for this executor's program and this batch's shapes, where either changed.
  /// \param others_know_more ranks of a pipeline may have been given batches of which only some show that shapes changed: then they
  /// tell each other. Collective
  /// \throws usage_error if this rank has failed before
  void open_for(executor& next, split_batch const& cut, bool others_know_more = true) {
    comm_->check_usable();
    shapes_.clear();
    cut.append_shapes(shapes_);
    bool const turn = open_for_ != &next;
    bool const changed = shapes_ != open_shapes_;
    if (turn || (others_know_more ? on_any_rank(changed) : changed)) next.open(more_slots_);
    open_for_ = &next;
    std::swap(shapes_, open_shapes_);
  }
  /// Before an executor goes: another may stand where it stood.
  void forget_open() { open_for_ = nullptr; }

 private:
  /// Of this pipeline.
  bool on_any_rank(bool here) const {
    topology const& where = comm_->topology();
    double const mine = here ? 1 : 0;
    std::vector<double> all(static_cast<std::size_t>(where.world()));
    comm_->all_gather(std::span(&mine, 1), all);
    auto const first = all.begin() + where.replica() * where.pipeline_ranks;
    return std::any_of(first, first + where.pipeline_ranks, [](double changed) { return changed != 0; });
  }

  transport* comm_;
  loss_function loss_;
  trainer_options options_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<stage> stages_;
  detail::data_agreement data_;
  slot_counts more_slots_{};
  executor const* open_for_ = nullptr;
  std::vector<std::int64_t> open_shapes_, shapes_;
};

}  // namespace chevron
