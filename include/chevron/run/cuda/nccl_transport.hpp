#pragma once

#include <c10/core/Device.h>

#include <chevron/run/comm/streams/stream_transport.hpp>
#include <chevron/run/cuda/cuda_streams.hpp>
#include <chevron/run/launch/launch.hpp>

/// \file
/// The transport between GPUs: NCCL.

namespace chevron {

/// Options of `nccl_transport`.
struct nccl_options {
  int device = -1;                 ///< this rank's GPU, as CUDA numbers visible ones; -1: by `cuda_device_of`
  nccl_channel_limits channels{};  ///< blocks of communicators
};

/// The GPU on which a rank computes, made this thread's current one.
/// \param local_rank `job::local_rank`
/// \throws usage_error without a usable GPU of that number, and for settings under which ranks would hang
inline at::Device gpu_of(int local_rank, nccl_options const& options = {}) {
  return detail::rank_gpu(local_rank, options.device, {.own_view = true});
}

/// Ranks on GPUs whose messages go over NCCL: one process for each rank, one GPU for each process.
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
