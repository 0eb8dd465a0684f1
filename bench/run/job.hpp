#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <chevron/run.hpp>
#include <chevron/run/gloo.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/schedule.hpp>

/// \file
/// What benchmarks of a step share.

namespace bench {

/// A schedule of the catalogue, proved and lowered.
inline chevron::program program_of(std::string const& schedule, int ranks, int micro_batches) {
  chevron::plan const made = chevron::catalogue::make_plan(schedule, {.ranks = ranks, .micro_batches = micro_batches});
  if (auto const broken = chevron::check(made)) throw chevron::usage_error(schedule + ": " + chevron::describe(broken).str());
  return chevron::lower(made);
}

/// Runs `rank(transport&)` on every rank: threads of this process, or processes over Gloo, of which this one is the first.
template <class Rank>
void on_ranks(std::string const& backend, int pipeline_ranks, int replicas, Rank const& rank) {
  if (backend == "threads") {
    chevron::run_threads({.pipeline_ranks = pipeline_ranks, .replicas = replicas}, rank);
    return;
  }
  auto const job = chevron::launch({.nproc = pipeline_ranks * replicas});
  chevron::gloo_transport line(job.place(pipeline_ranks, replicas), job);
  rank(line);
}

/// Reads the command line; true if there is something to do, else `code` is what the program ends with.
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
