#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Schedules, with and without recomputation, beside the memory that a rank has.

namespace plan_program {

/// One way to train: its time, and the bytes of the rank that takes most.
struct fit_point {
  std::string schedule;
  std::string recomputed;  ///< which ranks recompute; empty: none
  bool all = false;        ///< all of them do
  bool searched = false;
  double time = 0;
  std::int64_t bytes = 0;
  std::int64_t fixed = 0;  ///< of these, what is always there
  int rank = 0;
  std::shared_ptr<chevron::plan const> plan;
  std::vector<int> layers;  ///< of its stages; empty: not divided
  std::string again;  ///< of one that was searched: the command that gives it
};

/// From these bytes on, no schedule is faster than this.
struct fit_bound {
  std::int64_t bytes = 0;
  double time = 0;
};

/// All that `fit` found, for a picture.
struct fit_chart {
  std::string title, subtitle;
  std::string unit;         ///< of time; empty: the costs'
  std::int64_t memory = 0;  ///< that a rank has
  bool sliced = false;      ///< schedules of slices are among the points: the bounds are of whole microbatches
  std::vector<fit_point> points;
  std::vector<fit_bound> bound, bound_recomputed;  ///< the fewest bytes first; without and with recomputation of everything
};

/// Memory to the right, time upwards; follows the reader's light or dark scheme. \param page as a web page of its own
std::string fit_picture(fit_chart const& chart, bool page);

}  // namespace plan_program
