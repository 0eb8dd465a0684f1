#pragma once

#include <chevron/plan/profile.hpp>

/// \file
/// The report of an auto_schedule, which measures costs and searches a plan while training goes on. No LibTorch.

namespace chevron {

/// The outcome of a measurement.
enum class schedule_event {
  kept,       ///< the found plan is not shorter by `least_gain`: the program stays
  changed,    ///< the next step runs under the found plan
  confirmed,  ///< steps under the found plan are shorter than steps before
  went_back   ///< steps under the found plan are no shorter: the next step runs under the program before
};

/// A measurement of steps and its outcome, the same on every rank. Lengths are in milliseconds: from the first F to the last B or
/// W of a replica, with `post_validation` of the whole step.
struct replan_report {
  schedule_event what = schedule_event::kept;
  long step = 0;        ///< number of the last measured step
  int steps = 0;        ///< count of measured steps, of which `costs` are medians
  double drift = 0;     ///< where changed costs led to this search: their change since the last one, as a share (cost_drift)
  double measured = 0;  ///< measured length
  double running = 0;   ///< predicted length of the program that ran, with the measured costs
  double found = 0;     ///< predicted length of the found plan
  double bound = 0;     ///< no order with these stages on these ranks is shorter
  double before = 0;    ///< `confirmed`, `went_back`: measured length before the change
  double seconds = 0;   ///< of the search
  profile costs = {};   ///< the measured costs, as `auto_options::costs` gives them; on global rank 0, else empty
};

}  // namespace chevron
