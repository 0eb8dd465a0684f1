#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <chevron/jobs/launch.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

/// \file
/// Programs and ranks for benchmarks of a step.

namespace bench {

/// A schedule of the catalogue, proved and lowered.
inline chevron::proved_program program_of(std::string const& schedule, int ranks, int micro_batches, int slices = 1) {
  return chevron::lower(chevron::prove(
      chevron::catalogue::make_plan(schedule, {.ranks = ranks, .micro_batches = micro_batches, .slices = slices})));
}

/// Runs `rank(transport&)` on every rank: threads of this process, or processes over Gloo, of which this one is the first.
template <class Rank>
void on_ranks(std::string const& backend, int pipeline_ranks, int replicas, Rank const& rank) {
  if (backend == "threads") {
    chevron::run_threads({.pipeline_ranks = pipeline_ranks, .replicas = replicas}, rank);
    return;
  }
  auto const job = chevron::launch({.nproc = pipeline_ranks * replicas});
  chevron::gloo_transport comm(job.topology(pipeline_ranks, replicas), job);
  rank(comm);
}

/// Reads the command line; returns false if the program is to end with `code`.
inline bool parsed(CLI::App& app, int argc, char** argv, int& code) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (CLI::ParseError const& problem) {
    code = app.exit(problem) == 0 ? 0 : 2;
    return false;
  }
}

}  // namespace bench
