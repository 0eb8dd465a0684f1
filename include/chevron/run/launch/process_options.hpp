#pragma once

#include <chrono>

#include <chevron/lower/program.hpp>
#include <chevron/run/launch/environment.hpp>
#include <chevron/run/launch/launch.hpp>

/// \file
/// Options for the ranks of a program as processes.

namespace chevron {

/// Options of `run_processes`.
struct process_options {
  int replicas = 1;                            ///< copies of the pipeline, each with samples of its own
  int shards = 1;                              ///< ranks within each stage (shard_group.hpp)
  int expert_replicas = 1;                     ///< neighbouring replicas that hold a stage's experts together
  std::chrono::milliseconds deadline{300000};  ///< longest wait of a rank for another: 300 s
  launch_options launch{};                     ///< start of the ranks; `nproc` is overwritten
};

/// Whether a launcher (torchrun, srun, mpirun) has started this process as one of several ranks.
inline bool is_launched(process_options const& options) { return read_environment(options.launch.environment).world > 1; }

/// Launches the ranks of a program. A process that was started by hand forks as many ranks as the program has, times replicas and
/// shards, and the call returns in the children only; under a launcher this process is one of the ranks already.
/// \returns this rank's job
/// \throws timeout_error if ranks do not join; the errors of `launch`
inline job launch_ranks(program_view const& program, process_options const& options) {
  launch_options how = options.launch;
  how.nproc = is_launched(options) ? 0 : program.plan.size.ranks * options.replicas * options.shards;
  return launch(how);
}

}  // namespace chevron
