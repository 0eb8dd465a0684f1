#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/data/split_batch.hpp>

/// \file
/// What a step's microbatches count over all replicas.

namespace chevron::detail {

/// The sum, over the copies of a rank's stages, of what each replica's microbatches count. Replicas may hold batches of other
/// sizes, and none has to know the others': the sum starts with the step and is awaited before the first backward, whose loss it
/// weighs, so that it goes on beside the first forwards.
class replica_counts {
 public:
  replica_counts() = default;
  /// \param device what this rank computes on \param bucket the number of the sum that carries the counts
  replica_counts(at::Device device, int bucket) : device_(device), bucket_(bucket) {}

  /// A run is to begin.
  /// \param mine what this replica's microbatches count; not a number where this rank was not given what tells: nor is the total
  /// \param given the total, where the caller knows it; 0: `replicas` have it
  /// \param replicas whose counts are part of the total; 1: this one's alone
  /// \throws usage_error where they count nothing, if that is known already
  void set(double mine, double given, int replicas) {
    is_known_ = given > 0 || replicas == 1;
    total_ = given > 0 ? given : mine;
    if (is_known_ && total_ == 0) refuse_empty_mean();
  }
  /// Whether the total is known; else `start` and `finish` get it.
  bool is_known() const { return is_known_; }
  /// Starts to add it up. All replicas call it alike.
  void start(transport& comm) {
    sum_ = at::full({1}, total_, at::TensorOptions(at::kDouble).device(device_));
    comm.start_all_reduce(bucket_, sum_);
  }
  /// Waits for the other replicas.
  void finish(transport& comm) {
    comm.wait_all_reduce(bucket_);
    total_ = sum_.item<double>();
    is_known_ = true;
  }
  /// Of all replicas' microbatches.
  double total() const { return total_; }

 private:
  at::Device device_ = at::kCPU;
  int bucket_ = 0;
  at::Tensor sum_;
  double total_ = 0;  // of this replica until it is known
  bool is_known_ = true;
};

}  // namespace chevron::detail
