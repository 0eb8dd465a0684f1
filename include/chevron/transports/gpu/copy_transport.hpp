#pragma once

#include <chrono>
#include <memory>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/transports/gpu/copy_channel.hpp>
#include <chevron/transports/gpu/copy_streams.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/streams/stream_transport.hpp>

/// \file
/// The transport between GPUs of one machine, or on one GPU, without NCCL.

namespace chevron {

/// Options of `copy_transport`.
struct copy_options {
  int device = -1;            ///< number of the rank's GPU among visible GPUs; -1: by the rank's number on its machine
  bool share_gpus = false;    ///< whether a machine may have more ranks than GPUs
  copy_limits channels = {};  ///< memory of channels
};

/// A transport between ranks on GPUs of one machine; messages are copies of GPU memory.
///
///     chevron::job const job = chevron::launch();
///     chevron::copy_transport comm(job.topology(pipeline_ranks, replicas), job);
///
/// Used like `nccl_transport`. Rank processes may share a GPU, rank threads may not.
class copy_transport final : public stream_transport<copy_streams> {
 public:
  /// Joins the other ranks, which are processes; collective.
  /// \param where this rank's place, of `job.topology()`
  /// \param job must outlive this
  /// \throws usage_error without a usable GPU, or if ranks cannot reach each other's GPUs (exit code 2); timeout_error if ranks
  /// do not join within `job.join`
  copy_transport(chevron::topology const& where, job const& job, copy_options const& options = {})
      : copy_transport(where, job.store, job.watch, job.join,
                       detail::rank_gpu(job.local_rank, {.own_view = true, .share = options.share_gpus, .given = options.device}),
                       options.channels) {}
  /// Joins the other ranks, which are threads of this process, each with a GPU and a failure monitor of its own.
  /// \param join longest wait for other ranks at the start
  copy_transport(chevron::topology const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_monitor> watch,
                 std::chrono::milliseconds join, at::Device device, copy_limits const& channels = {})
      : stream_transport<copy_streams>(where, std::move(store), std::move(watch), join, device, channels) {}
};

}  // namespace chevron
