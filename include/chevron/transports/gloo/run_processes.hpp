#pragma once

#include <concepts>

#include <chevron/jobs/process_options.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

/// \file
/// Runs ranks as processes, over Gloo.

namespace chevron {

/// Runs `body(transport&)` on this rank of a program, over Gloo. A process that was started by hand forks as many children as
/// the program has ranks, times replicas and shards, and the call returns in the children only, so call it before LibTorch
/// computes anything. Under a launcher (torchrun, srun, mpirun) this process is a rank already. Call it in `run_main`, which
/// turns errors into exit codes.
///
///     chevron::run_processes(program, {.replicas = 2}, [&](chevron::transport& comm) { … });
///
/// \param program sets the number of pipeline ranks; a `proved_program` can be passed
/// \param options replicas, shards, deadline and launch options
/// \param body called once in this process, with the transport of this rank
/// \throws usage_error if a launcher has started a different number of processes; timeout_error if ranks do not join within
/// `launch.join`; exceptions of `body`
template <class Body>
void run_processes(program_view const& program, process_options const& options, Body const& body) {
  job const rank = launch_ranks(program, options);
  gloo_transport comm(rank.topology(program.plan.size.ranks, options.replicas, options.shards, options.expert_replicas), rank);
  comm.deadline(options.deadline);
  body(static_cast<transport&>(comm));
  comm.close();
}

/// Catches a program that no variable holds: does not compile, and says so.
template <std::same_as<proved_program> Program, class Body>
void run_processes(Program&&, process_options const&, Body const&) {
  static_assert(
      sizeof(Body) == 0,
      "this program ends at the end of the line: store it in a variable first, auto const program = lower(prove(plan)), and "
      "pass the variable");
}

}  // namespace chevron
