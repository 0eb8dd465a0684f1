#pragma once

#include <chrono>

#include <chevron/jobs/environment.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/lower/program.hpp>

/// \file
/// Options for running a program's ranks as processes.

namespace chevron {

/// Options of `run_processes`.
struct process_options {
  int replicas = 1;                            ///< copies of the pipeline, each with its own samples
  int shards = 1;                              ///< ranks that share each stage (shard_group.hpp)
  int expert_replicas = 1;                     ///< neighbouring replicas over which a stage's experts are divided
  std::chrono::milliseconds deadline{300000};  ///< longest wait of a rank for another rank: 300 s
  launch_options launch{};                     ///< options for starting the ranks; `nproc` is overwritten
};

/// Whether a launcher (torchrun, srun, mpirun) has started this process as one of several ranks.
inline bool is_launched(process_options const& options) { return read_environment(options.launch.environment).world > 1; }

/// Launches the ranks of a program. A process that was started by hand forks as many children as the program has ranks, times
/// replicas and shards, and the call returns in the children only; a process that a launcher started as a rank forks nothing.
/// \returns this rank's job
/// \throws timeout_error if ranks do not join; the errors of `launch`
inline job launch_ranks(program_view const& program, process_options const& options) {
  launch_options how = options.launch;
  how.nproc = is_launched(options) ? 0 : program.plan.size.ranks * options.replicas * options.shards;
  return launch(how);
}

}  // namespace chevron
