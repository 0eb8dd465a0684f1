#pragma once

#include <string>

#include "scenario.hpp"

/// \file
/// One scenario, run in processes of its own and judged.

namespace torture {

struct verdict {
  bool struck = false;        ///< the fault; else the job came to grief before it, or to its end
  bool hangs = false;       ///< not over after `longest`, or a process stayed
  bool right_code = false;  ///< the exit code that the documents promise for this fault
  bool right_rank = false;  ///< everyone who says something blames the rank that was struck
  bool right_action = false;  ///< who threw says in which action; true where only the rank itself could know
  int code = 0;
  double seconds = 0;
  std::string output;

  bool well() const { return struck && !hangs && right_code && right_rank && right_action; }
};

/// Runs a scenario. The process that calls it computes nothing itself, so that it can be forked.
verdict run_apart(scenario const& what);

}  // namespace torture
