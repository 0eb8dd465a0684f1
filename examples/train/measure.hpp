#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/run/record.hpp>
#include <chevron/show/picture.hpp>

/// \file
/// The prediction put to the test: what the last steps cost, and what the schedule makes of these costs.

namespace chevron::train {

/// One rank's records of its last steps.
class step_records {
 public:
  static constexpr std::size_t kept = 20;

  void keep(record const& of, double seconds);
  /// For `transport::gather_text`.
  std::string text() const;

 private:
  struct one {
    long step = 0;
    double seconds = 0;
    int peak_in_flight = 0;
    std::vector<recorded> entries;
  };
  std::deque<one> steps_;
};

/// What came of it, times in seconds.
struct comparison {
  int steps = 0;                                                           ///< looked at: the last ones of the run
  long typical_step = 0;                                                   ///< the one whose pipeline took the median time
  std::vector<double> forward, backward, input_gradient, weight_gradient;  ///< by stage: median of all replicas; 0: never ran
  show::picture predicted, measured;                                       ///< of the typical step, in milliseconds
  double predicted_pipeline = 0, measured_pipeline = 0;  ///< first F to last B or W over all ranks; measured: median
  double predicted_bubble = 0, measured_bubble = 0;      ///< share of ranks × that time without compute
  std::vector<int> predicted_peak, measured_peak;  ///< chunks in flight; predicted by pipeline rank, measured by global rank
  double measured_step = 0;   ///< all of the step, with gradient sums and optimizer: median
  double predicted_step = 0;  ///< where steps overlap, what each of many adds; else 0
};

/// \param texts every rank's records, by global rank
/// \param steps_overlap ranks go on with the next step without waiting for each other
comparison compared(program_view const& program, std::vector<std::string> const& texts, bool steps_overlap);

/// The table for people. `shared_cores`: how many ranks of this machine share how few cores; empty if each has its own.
std::string table_of(comparison const& c, std::string const& shared_cores);

}  // namespace chevron::train
