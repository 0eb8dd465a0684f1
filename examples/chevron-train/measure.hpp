#pragma once

#include <string>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/show/html_model.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// The prediction put to the test: what the last steps cost, and what the schedule makes of these costs.

namespace chevron::train {

/// What came of it, times in milliseconds.
struct comparison {
  profile measured;       ///< costs by stage and boundary, the pipeline's and the whole step's time: medians
  profile for_file{};     ///< the same; of sequences in slices, costs of whole microbatches
  long typical_step = 0;  ///< the one whose pipeline took the median time
  show::picture predicted_picture, measured_picture;  ///< of the typical step
  show::drawn_facts predicted_facts;                  ///< what else is known of the prediction
  double predicted_pipeline = 0;                      ///< first F to last B or W over all ranks
  double predicted_step = 0;                          ///< where steps overlap, what each of many adds; else 0
  double predicted_bubble = 0, measured_bubble = 0;   ///< share of ranks × that time without compute
  int shards = 1;                                     ///< of each stage: ranks of which the first stands for all
  std::vector<int> predicted_peak, measured_peak;     ///< chunks in flight; predicted by pipeline rank, measured by place
  std::vector<allocator_use> memory;                  ///< by place (replica × P + pipeline rank); 0 without GPUs
};

/// \param texts every rank's `trace_window::text`, by global rank \param shards of each stage
/// \param steps_overlap ranks go on with the next step without waiting for each other
comparison compared(program_view const& program, std::vector<std::string> const& texts, int shards, bool steps_overlap);

/// The table for people. `shared_cores`: how many ranks of this machine share how few cores; empty if each has its own.
std::string table_of(comparison const& c, std::string const& shared_cores);

}  // namespace chevron::train
