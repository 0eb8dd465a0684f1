#pragma once

#include <concepts>

#include <c10/core/Device.h>

#include <chevron/jobs/process_options.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>

/// \file
/// Runs ranks on GPUs, by one call.

namespace chevron {

/// Runs `body(transport&, device)` on this rank of a program, over NCCL, with one GPU per process. The body builds its stages
/// on the device and passes the device to the trainer as `trainer_options::device`. Processes are started and joined as by
/// `run_processes`; without a launcher, GPUs are counted before any process is forked.
///
///     chevron::run_gpus(program, {.replicas = 2}, [&](chevron::transport& comm, at::Device device) { … });
///
/// \throws usage_error with the reason if a rank has no GPU, or a launcher has started another number of processes; timeout_error
/// if ranks do not join
template <class Body>
void run_gpus(program_view const& program, process_options const& options, Body const& body) {
  int const ranks = program.plan.size.ranks;
  if (!is_launched(options))
    (void)cuda_device_of(ranks * options.replicas * options.shards - 1, look_for_cuda_devices_before_fork());
  job const rank = launch_ranks(program, options);
  nccl_transport comm(rank.topology(ranks, options.replicas, options.shards, options.expert_replicas), rank);
  comm.deadline(options.deadline);
  body(static_cast<transport&>(comm), comm.device());
  comm.close();
}

/// Catches a program that no variable holds: does not compile, and says so.
template <std::same_as<proved_program> Program, class Body>
void run_gpus(Program&&, process_options const&, Body const&) {
  static_assert(
      sizeof(Body) == 0,
      "this program ends at the end of the line: store it in a variable first, auto const program = lower(prove(plan)), and "
      "pass the variable");
}

}  // namespace chevron
