#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage_loss.hpp>

/// \file
/// The sums of microbatches' weights over all replicas.

namespace chevron::detail {

/// The sums over the replicas of the microbatches' weights in the model's loss and in the losses of a rank's stages. Replicas
/// may have batches of different sizes, and do not know each other's sizes. The sum starts with the step, overlaps with the
/// first forwards, and ends before the first backward, which needs each microbatch's share.
class replica_counts {
 public:
  replica_counts() = default;
  /// \param device of this rank's stages \param bucket number of the collective
  /// \param losses the number of losses that this rank's stages declare
  replica_counts(at::Device device, int bucket, std::size_t losses)
      : device_(device), bucket_(bucket), totals_(1 + losses), factors_(losses) {}

  /// Sets the totals before a run: the caller's, or until `finish` those of this replica.
  /// \param cut this replica's microbatches with their weights; a weight that this rank does not know is NaN, and so is its
  /// total
  /// \param given the totals that the caller knows
  /// \param replicas the number of replicas over which totals are summed
  /// \throws usage_error if the total of the model's loss is known and 0
  void set(split_batch const& cut, std::span<rank_loss const> losses, step_total const& given, int replicas) {
    is_known_ = given.model > 0 || replicas == 1;
    totals_[0] = given.model > 0 ? given.model : cut.counts();
    if (is_known_ && totals_[0] == 0) refuse_empty_mean();
    given_.assign(totals_.size(), false);
    given_[0] = is_known_;
    for (std::size_t k = 0; k < losses.size(); ++k) {
      std::optional<double> known = given.of(losses[k].name);
      if (!losses[k].weight) known = given.model > 0 ? std::optional(given.model) : std::nullopt;
      given_[1 + k] = known.has_value() || replicas == 1;
      is_known_ = is_known_ && given_[1 + k];
      totals_[1 + k] = known.value_or(cut.loss_counts(k));
      factors_[k] = losses[k].factor;
    }
  }
  /// Whether the totals are known; if not, `start` and `finish` sum them.
  bool is_known() const { return is_known_; }
  /// Starts the sum. Collective over the replicas.
  void start(transport& comm) {
    sum_ = at::empty({static_cast<std::int64_t>(totals_.size())}, at::kDouble);
    std::copy(totals_.begin(), totals_.end(), sum_.mutable_data_ptr<double>());
    if (!device_.is_cpu()) sum_ = sum_.to(device_);
    comm.start_all_reduce(bucket_, sum_);
  }
  /// Waits for the sum, which makes all totals known.
  void finish(transport& comm) {
    comm.wait_bucket(bucket_);
    at::Tensor const sums = host_copy(sum_);
    for (std::size_t k = 0; k < totals_.size(); ++k) {
      if (!given_[k]) totals_[k] = sums.const_data_ptr<double>()[k];
    }
    is_known_ = true;
  }
  /// Sets each microbatch's shares, its weights divided by the totals; 0 in a loss whose total is 0.
  void share(split_batch& cut) const {
    std::vector<double> over = totals_;
    for (double& total : over) total = total == 0 ? 1 : total;
    cut.share(over[0], std::span(over).subspan(1), factors_);
  }
  /// The total of the model's loss.
  double total() const { return totals_[0]; }
  /// The totals of the losses of this rank's stages.
  std::span<double const> of_losses() const { return std::span(totals_).subspan(1); }

 private:
  at::Device device_ = at::kCPU;
  int bucket_ = 0;
  at::Tensor sum_;
  std::vector<double> totals_{0};  // of the model's loss, then of the stages' losses; this replica's until known
  std::vector<bool> given_{false};
  std::vector<double> factors_;
  bool is_known_ = true;
};

}  // namespace chevron::detail
