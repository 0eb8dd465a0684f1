#pragma once

#include <string>
#include <vector>

/// \file
/// What the plain loop has to know of a schedule: in which order each stage's gradients are added. Nothing else of Chevron
/// decides what the plain loop computes.

namespace differential {

struct plan_facts {
  int stages = 0;                           ///< 0: there is no such plan
  std::vector<int> rank_of;                 ///< by stage
  std::vector<std::vector<int>>
      additions;  ///< by stage: microbatches, or their slices by unit, in the order of the stage's B or W
};

plan_facts facts_of(std::string const& schedule, int ranks, int micro_batches, int slices = 1);

std::vector<std::string> const& schedules();
/// Schedules that run slices.
std::vector<std::string> const& sliced_schedules();

}  // namespace differential
