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
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/data/stage_loss.hpp>

/// \file
/// What a step's microbatches count over all replicas.

namespace chevron::detail {

/// The sums, over the copies of a rank's stages, of what each replica's microbatches count in the model's loss and in the losses
/// of these stages. Replicas may hold batches of other sizes, and none has to know the others': the sum starts with the step and
/// is awaited before the first backward, whose losses it weighs, so that it goes on beside the first forwards.
class replica_counts {
 public:
  replica_counts() = default;
  /// \param device what this rank computes on \param bucket the number of the sum that carries the counts
  /// \param losses of this rank's stages
  replica_counts(at::Device device, int bucket, std::size_t losses)
      : device_(device), bucket_(bucket), totals_(1 + losses), factors_(losses) {}

  /// A run is to begin.
  /// \param cut this replica's microbatches, weighed; counts that this rank cannot know are not a number, and so are their totals
  /// \param given the totals, where the caller knows them
  /// \param replicas whose counts are part of the totals; 1: this one's alone
  /// \throws usage_error where they count nothing, if that is known already
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
  /// Whether the totals are known; else `start` and `finish` get them.
  bool is_known() const { return is_known_; }
  /// Starts to add them up. All replicas call it alike.
  void start(transport& comm) {
    sum_ = at::empty({static_cast<std::int64_t>(totals_.size())}, at::kDouble);
    std::copy(totals_.begin(), totals_.end(), sum_.mutable_data_ptr<double>());
    if (!device_.is_cpu()) sum_ = sum_.to(device_);
    comm.start_all_reduce(bucket_, sum_);
  }
  /// Waits for the other replicas.
  void finish(transport& comm) {
    comm.wait_bucket(bucket_);
    at::Tensor const sums = host_copy(sum_);
    for (std::size_t k = 0; k < totals_.size(); ++k) {
      if (!given_[k]) totals_[k] = sums.const_data_ptr<double>()[k];
    }
    is_known_ = true;
  }
  /// Gives each microbatch its shares. A loss in which no microbatch counts has none.
  void share(split_batch& cut) const {
    std::vector<double> over = totals_;
    for (double& total : over) total = total == 0 ? 1 : total;
    cut.share(over[0], std::span(over).subspan(1), factors_);
  }
  /// Of all replicas' microbatches, in the model's loss.
  double total() const { return totals_[0]; }
  /// The same in the losses of this rank's stages.
  std::span<double const> of_losses() const { return std::span(totals_).subspan(1); }

 private:
  at::Device device_ = at::kCPU;
  int bucket_ = 0;
  at::Tensor sum_;
  std::vector<double> totals_{0};  // of this replica until they are known; first the model's
  std::vector<bool> given_{false};
  std::vector<double> factors_;
  bool is_known_ = true;
};

}  // namespace chevron::detail
