#pragma once

#include <chevron/plan/profile.hpp>

/// \file
/// What came of a look at the costs, while training goes on (auto_schedule.hpp). No LibTorch.

namespace chevron {

/// What became of a look at the costs.
enum class schedule_event {
  kept,       ///< nothing that was found is shorter by `least_gain`
  changed,    ///< the next step runs under what was found
  confirmed,  ///< measured under it, steps are shorter than they were
  went_back   ///< they are not: the next step runs under the program of before
};

/// A look at the costs, the same on every rank. Lengths are in milliseconds: of what counts, from the first F to the last B or W
/// of a replica, and with `post_validation` of the whole step.
struct replan_report {
  schedule_event what = schedule_event::kept;
  long step = 0;        ///< after which
  int steps = 0;        ///< so many steps' medians
  double drift = 0;     ///< a share, where costs had changed; else 0
  double measured = 0;  ///< length measured
  double running = 0;   ///< predicted from the measured costs: of the program that ran
  double found = 0;     ///< of what was found
  double bound = 0;     ///< no order with these stages on these ranks is shorter
  double before = 0;    ///< `confirmed`, `went_back`: length measured before the change
  double seconds = 0;   ///< spent on the search
  profile costs = {};   ///< that were planned for, or looked at; on global rank 0, else empty
};

}  // namespace chevron
