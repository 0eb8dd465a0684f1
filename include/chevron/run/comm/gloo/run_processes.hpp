#pragma once

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/launch/process_options.hpp>

/// \file
/// Ranks as processes, with one call.

namespace chevron {

/// Runs `body(transport&)` on this rank of a program, over Gloo. Started by hand, it forks as many ranks as the program has,
/// times the replicas: call it before anything of LibTorch has run, for it returns in the children only. Under a launcher
/// (torchrun, srun, mpirun) this process is one of the ranks already. To be called within `run_main`, which turns errors into
/// exit codes.
///
///     chevron::run_processes(program, {.replicas = 2}, [&](chevron::transport& comm) { … });
///
/// \param program says how many pipeline ranks there are; `proved_program` converts
/// \param body called once in this process, with the transport of its rank, until it returns
/// \throws usage_error if a launcher has started another number of processes; timeout_error if ranks do not come within
/// `launch.join`; and whatever `body` throws
template <class Body>
void run_processes(program_view const& program, process_options const& options, Body const& body) {
  job const rank = launch_ranks(program, options);
  gloo_transport comm(rank.topology(program.plan.size.ranks, options.replicas, options.shards, options.expert_replicas), rank);
  comm.deadline(options.deadline);
  body(static_cast<transport&>(comm));
  comm.close();
}

}  // namespace chevron
