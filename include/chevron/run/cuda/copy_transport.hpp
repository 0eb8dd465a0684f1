#pragma once

#include <chrono>
#include <memory>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/comm/streams/stream_transport.hpp>
#include <chevron/run/cuda/copy_channel.hpp>
#include <chevron/run/cuda/copy_streams.hpp>
#include <chevron/run/cuda/rank_gpu.hpp>
#include <chevron/run/failure/failure_monitor.hpp>
#include <chevron/run/launch/launch.hpp>

/// \file
/// The transport between GPUs of one machine, or on one GPU, without NCCL.

namespace chevron {

/// What a rank on a GPU may be told.
struct copy_options {
  int device = -1;            ///< the GPU of this rank, as CUDA numbers those it may see; -1: by its number on its machine
  bool share_gpus = false;    ///< ranks may be more than GPUs
  copy_limits channels = {};  ///< of each kind of channel
};

/// Ranks on GPUs of one machine whose messages are copies.
///
///     chevron::job const job = chevron::launch();
///     chevron::copy_transport comm(job.topology(pipeline_ranks, replicas), job);
///
/// It is used as `nccl_transport` is. Ranks may share a GPU.
class copy_transport final : public stream_transport<copy_streams> {
 public:
  /// Ranks that are processes join each other; collective.
  /// \param where this rank's place, of `job.topology()`
  /// \param job must outlive this
  /// \throws usage_error without a usable GPU, and where ranks cannot reach each other's GPUs (exit code 2), timeout_error where
  /// ranks do not come within `job.join`
  copy_transport(chevron::topology const& where, job const& job, copy_options const& options = {})
      : copy_transport(where, job.store, job.watch, job.join,
                       detail::rank_gpu(job.local_rank, options.device, {.own_view = true, .share = options.share_gpus}),
                       options.channels) {}
  /// Ranks that are threads of one process, each with a watch of its own, on GPUs that the caller names.
  /// \param join how long ranks wait for each other at the start
  copy_transport(chevron::topology const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_monitor> watch,
                 std::chrono::milliseconds join, at::Device device, copy_limits const& channels = {})
      : stream_transport<copy_streams>(where, std::move(store), std::move(watch), join, device, channels) {}
};

}  // namespace chevron
