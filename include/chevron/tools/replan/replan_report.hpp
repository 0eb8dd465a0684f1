#pragma once

#include <chevron/plan/profile.hpp>

/// \file
/// The report of an auto_schedule, which measures costs and searches a plan during training. Does not include LibTorch.

namespace chevron {

/// The outcome of a measurement.
enum class schedule_event {
  kept,       ///< the found plan is not shorter by `least_gain`: the program is unchanged
  changed,    ///< the next step runs under the found plan
  confirmed,  ///< steps under the found plan are shorter than those under the old plan
  went_back   ///< steps under the found plan are not shorter: the next step runs under the old program
};

/// A measurement of steps and its outcome, equal on every rank. Lengths are in milliseconds: from a replica's first computation
/// to the end of its last, or with `post_validation` the time of a whole step.
struct replan_report {
  schedule_event what = schedule_event::kept;
  long step = 0;        ///< number of the last measured step
  int steps = 0;        ///< count of measured steps, of which `costs` are medians
  double drift = 0;     ///< change of costs since the last search, as a share (cost_drift), if costs were watched; else 0
  double measured = 0;  ///< measured length
  double running = 0;   ///< predicted length of the program that ran, with the measured costs
  double found = 0;     ///< predicted length of the found plan
  double bound = 0;     ///< lower bound for every order with these stages on these ranks
  double before = 0;    ///< `confirmed`, `went_back`: measured length before the change
  double seconds = 0;   ///< of the search
  profile costs = {};   ///< measured costs, after `auto_options::costs`; empty except on global rank 0
};

}  // namespace chevron
