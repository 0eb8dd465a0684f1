#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/proved_plan.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/search/problem/objective.hpp>

/// \file
/// The common parts of auto_schedule and length_schedule: one rank searches, all ranks receive the plan and prove it.

namespace chevron::detail {

/// An option of a planner: whether its value is allowed, and the allowed range in words.
struct planning_option {
  char const* name;
  std::string value;
  bool allowed = true;
  char const* range = "";
};
/// The options that both planners have.
inline std::vector<planning_option> planning_options(int steps, double least_gain, activation_limit memory) {
  return {{"steps", number_text(steps), steps >= 1 && steps <= static_cast<int>(trace_window::kept), "from 1 to 20"},
          {"least_gain", number_text(least_gain), least_gain >= 0 && least_gain < 1, "from 0 to below 1"},
          {"memory.most", number_text(memory.most)},
          {"memory.kept_for_weight", number_text(memory.kept_for_weight)}};
}
/// Checks a planner's options, and compares them over the ranks. Collective.
/// \param type name of the options' type, for errors
/// \throws usage_error for a value that is not allowed; preflight_error if ranks have different values
inline void check_options(transport& comm, std::string const& type, std::vector<planning_option> const& options) {
  named_values lines;
  for (planning_option const& one : options) {
    if (!one.allowed) throw usage_error(type + "::" + one.name + " " + one.value + " is not " + one.range);
    lines.add(type + "::" + one.name, one.value);
  }
  check_consistency(comm, lines);
}

/// The length that a search minimizes: a rank's span with post-validation, under which steps overlap, else the makespan.
inline search::objective objective_of(trainer& train) {
  return trainer_access::context(train).options().post_validation ? search::objective::span : search::objective::makespan;
}

/// Refuses plans with slices, which planning while training does not handle.
/// \param planner name of the calling class, for the error
/// \throws usage_error, the same on every rank, for a program whose plan has slices
inline void refuse_slices(trainer const& train, std::string const& planner) {
  int const slices = train.program().plan.size.slices;
  if (slices == 1) return;
  throw usage_error(planner + " plans for whole microbatches, and this program cuts each into " + std::to_string(slices) +
                    " slices. Remedy: keep the schedule, without " + planner + ", or a program with slices = 1");
}

/// Calls `decide` on global rank 0, and returns its text on every rank. Collective.
/// \param what a word or two for what is planned, for the error
/// \param step number of the step, for the error
/// \throws usage_error, the same on every rank, if `decide` throws any exception
template <class Decide>
std::string decided_by_first(transport& comm, char const* what, long step, Decide decide) {
  constexpr std::string_view failed = "failed ";
  std::string said;
  if (comm.topology().global_rank == 0) {
    try {
      said = decide();
    } catch (std::exception const& e) {
      said = std::string(failed) + e.what();
    }
  }
  std::string told = comm.all_gather_text(said).front();
  if (told.starts_with(failed)) {
    throw usage_error("planning the " + std::string(what) + " failed on rank 0: " + told.substr(failed.size()),
                      {.rank = comm.topology().global_rank, .step = step});
  }
  return told;
}

/// Proves and lowers a searched plan. \param csv the plan, without name and limit \param memory the limit of the search
inline proved_program searched_program(std::string_view csv, activation_limit memory) {
  plan made = read_csv(csv).plan;
  made.name = "searched";
  if (memory.kept_for_weight == 1) made.in_flight_limit = memory.chunks();
  return lower(prove(std::move(made)));
}

}  // namespace chevron::detail
