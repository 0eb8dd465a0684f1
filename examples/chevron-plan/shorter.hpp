#pragma once

#include <optional>
#include <string>

#include <chevron/plan/plan.hpp>

#include "request.hpp"

/// \file
/// Schedules of the catalogue are made for many microbatches. Where a step has few, a search finds shorter ones.

namespace plan_program {

/// What a search finds within a schedule's own memory.
struct shorter_schedule {
  double length = 0;    ///< makespan, in the costs' unit
  std::string command;  ///< that finds it
};

/// Looks for a schedule on the same placement that is shorter than this one of the catalogue and holds no more chunks on any
/// rank; nothing where no search finds one, where a step has 2P microbatches or more, or where times or lengths vary. Takes
/// milliseconds.
///
/// \param costs_of how many chunks the costs on the command line are of: 1 where they are a chunk's
std::optional<shorter_schedule> shorter_than(request const& asked, chevron::plan_view const& plan,
                                             chevron::cost_view const& costs, int costs_of);

}  // namespace plan_program
