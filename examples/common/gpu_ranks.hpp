#pragma once

#include <chrono>
#include <string>

#include <chevron/run/core/error.hpp>
#include <chevron/transports/gpu/copy_transport.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/cuda_graph.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>
#include <chevron/transports/gpu/shared_gpus.hpp>

#include "common/ranks.hpp"

/// \file
/// Ranks on GPUs, for the programs whose names end in -nccl.

namespace chevron::train {

/// The GPU of a rank on this machine. With the flag in the error.
inline int gpu_for(job_options const& o, int local_rank, cuda_devices const& found, cuda_sharing const& how) {
  try {
    return cuda_device_of(local_rank, found, how);
  } catch (usage_error const& none) {
    throw usage_error(std::string(o.backend == backend::copies ? "--backend copies: " : "--backend nccl: ") + none.what());
  }
}

inline void look_before_fork(job_options const& o) {
  (void)gpu_for(o, o.world() - 1, look_for_cuda_devices_before_fork(), {.share = o.share_gpus});
}

inline void run_on_gpus(job_options const& o, job const& rank, std::string const& launcher, rank_body const& body) {
  int const gpu = gpu_for(o, rank.local_rank, look_for_cuda_devices(), {.own_view = true, .share = o.share_gpus});
  auto const run = [&](auto&& comm, std::string const& how = "") {
    comm.deadline(std::chrono::milliseconds(static_cast<long>(o.timeout * 1000)));
    body({.comm = comm, .launcher = launcher + how, .device = comm.device(), .graphs = o.cuda_graph ? cuda_graphs() : nullptr});
    comm.close();
  };
  chevron::topology const where = rank.topology(o.ranks, o.replicas, o.shards);
  if (o.backend == backend::copies)
    return run(copy_transport(where, rank, {.device = gpu}), o.share_gpus ? ", sharing GPUs" : "");
  bool const pretends = o.share_gpus && share_cuda_device(where, rank, gpu);
  run(nccl_transport(where, rank, {.device = gpu}), pretends ? ", sharing GPUs over sockets, as if on two machines" : "");
}

inline constexpr gpu_side over_nccl{.before_fork = look_before_fork, .run = run_on_gpus};

}  // namespace chevron::train
