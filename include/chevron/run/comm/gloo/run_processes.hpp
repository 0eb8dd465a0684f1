#pragma once

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/launch/process_options.hpp>

/// \file
/// Runs ranks as processes, over Gloo.

namespace chevron {

/// Runs `body(transport&)` on this rank of a program, over Gloo. A process that was started by hand forks the program's ranks,
/// times replicas and shards; the call returns in the children only, so it must come before any call that makes LibTorch compute.
/// Under a launcher (torchrun, srun, mpirun) this process is one of the ranks already. To be called within `run_main`, which
/// turns errors into exit codes.
///
///     chevron::run_processes(program, {.replicas = 2}, [&](chevron::transport& comm) { … });
///
/// \param program its number of ranks is used; a `proved_program` can be passed
/// \param options replicas, shards, deadline and launch options
/// \param body called once in this process, with the transport of its rank, until it returns
/// \throws usage_error if a launcher has started another number of processes; timeout_error if ranks do not join within
/// `launch.join`; exceptions of `body`
template <class Body>
void run_processes(program_view const& program, process_options const& options, Body const& body) {
  job const rank = launch_ranks(program, options);
  gloo_transport comm(rank.topology(program.plan.size.ranks, options.replicas, options.shards, options.expert_replicas), rank);
  comm.deadline(options.deadline);
  body(static_cast<transport&>(comm));
  comm.close();
}

}  // namespace chevron
