#pragma once

#include <chrono>
#include <string>

#include <chevron/run/core/error.hpp>
#include <chevron/run/cuda/cuda_devices.hpp>
#include <chevron/run/cuda/cuda_graph.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>

#include "common/ranks.hpp"

/// \file
/// Ranks on GPUs, for the programs whose names end in -nccl.

namespace chevron::train {

/// The GPU of a rank on this machine. With the flag in the error.
inline int gpu_for(int local_rank, cuda_devices const& found, cuda_sharing const& how) {
  try {
    return cuda_device_of(local_rank, found, how);
  } catch (usage_error const& none) {
    throw usage_error(std::string("--backend nccl: ") + none.what());
  }
}

inline void look_before_fork(job_options const& o) {
  (void)gpu_for(o.world() - 1, look_for_cuda_devices_before_fork(), {.share = o.share_gpus});
}

inline void run_over_nccl(job_options const& o, job const& rank, std::string const& launcher, rank_body const& body) {
  int const gpu = gpu_for(rank.local_rank, look_for_cuda_devices(), {.own_view = true, .share = o.share_gpus});
  if (o.share_gpus) share_cuda_device(rank.local_rank);
  nccl_transport comm(rank.topology(o.ranks, o.replicas), rank, {.device = gpu});
  comm.deadline(std::chrono::milliseconds(static_cast<long>(o.timeout * 1000)));
  body({.comm = comm, .launcher = launcher, .device = comm.device(), .graphs = o.cuda_graph ? cuda_graphs() : nullptr});
  comm.close();
}

inline constexpr gpu_side over_nccl{.before_fork = look_before_fork, .run = run_over_nccl};

}  // namespace chevron::train
