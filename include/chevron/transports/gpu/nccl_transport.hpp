#pragma once

#include <c10/core/Device.h>

#include <chevron/jobs/launch.hpp>
#include <chevron/transports/gpu/cuda_streams.hpp>
#include <chevron/transports/streams/stream_transport.hpp>

/// \file
/// The transport between GPUs over NCCL.

namespace chevron {

/// Options of `nccl_transport`.
struct nccl_options {
  int device = -1;                 ///< number of the rank's GPU among visible GPUs; -1: by `cuda_device_of`
  nccl_channel_limits channels{};  ///< limits of communicators' blocks
};

/// Returns the GPU on which a rank computes, and makes it this thread's current GPU.
/// \param local_rank `job::local_rank`
/// \throws usage_error if no GPU is left for the rank or `options.device` does not exist, and for settings under which ranks
/// would hang
inline at::Device gpu_of(int local_rank, nccl_options const& options = {}) {
  return detail::rank_gpu(local_rank, {.own_view = true, .given = options.device});
}

/// A transport between ranks on GPUs, over NCCL: one process per rank, one GPU per process.
///
///     chevron::job const job = chevron::launch();
///     chevron::nccl_transport comm(job.topology(pipeline_ranks, replicas), job);
///     // stages and their parameters go to comm.device(), and so do the trainer's options
///     comm.close();
///
/// Batches may stay on the CPU: the trainer copies them to the device. `examples/nccl_train.cpp` is a whole program.
class nccl_transport final : public stream_transport<cuda_streams> {
 public:
  /// Joins the other ranks; collective.
  /// \param where this rank's place, of `job.topology()`
  /// \param job must outlive this
  /// \throws usage_error without a usable GPU (exit code 2); timeout_error if ranks do not join within `job.join`
  nccl_transport(chevron::topology const& where, job const& job, nccl_options const& options = {})
      : stream_transport<cuda_streams>(where, job.store, job.watch, job.join, gpu_of(job.local_rank, options), options.channels) {
  }
};

}  // namespace chevron
