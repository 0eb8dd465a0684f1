#pragma once

#include <string>
#include <utility>
#include <vector>

#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

/// \file
/// The program of a schedule that Python names or gives as text.

namespace chevron_pipelining {

/// The proved program of a name of the catalogue, or of the text of a CSV file, which has commas.
/// \param chunks stages of a rank \throws chevron::usage_error for a text that is no schedule; invalid_schedule_error for a name
/// that the catalogue lacks, and for sizes that the schedule refuses
inline chevron::proved_program program_of(std::string const& schedule, int ranks, int micro_batches, int chunks) {
  if (schedule.find(',') == std::string::npos) {
    return chevron::lower(chevron::prove(
        chevron::catalogue::make_plan(schedule, {.ranks = ranks, .micro_batches = micro_batches, .chunks = chunks})));
  }
  chevron::csv_schedule read = chevron::read_csv(schedule);
  if (auto const fault = chevron::check(read, schedule)) throw chevron::usage_error(chevron::describe(fault, read, schedule));
  return chevron::lower(chevron::prove(std::move(read.plan)));
}

/// The rank of each stage of a program.
inline std::vector<int> ranks_of_stages(chevron::proved_program const& of) {
  chevron::plan_view const& plan = of.view().plan;
  std::vector<int> out;
  for (int s = 0; s < plan.stages; ++s) out.push_back(plan.rank_of_stage(s));
  return out;
}

}  // namespace chevron_pipelining
