#pragma once

#include <string>
#include <vector>

/// \file
/// The facts of a schedule that the plain loop needs: the order in which each stage's gradients are added. All else of the
/// plain loop is independent of Chevron.

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
