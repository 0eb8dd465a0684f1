#pragma once

#include "apart.hpp"
#include "scenario.hpp"

/// \file
/// One scenario, run and judged.

namespace torture {

struct verdict : outcome {
  bool struck = false;        ///< the fault; else the job came to grief before it, or to its end
  bool right_code = false;    ///< the exit code that the documents promise for this fault
  bool right_rank = false;    ///< everyone who says something blames the rank that was struck
  bool right_action = false;  ///< who threw says in which action; true where only the rank itself could know

  bool well() const { return struck && !hangs && right_code && right_rank && right_action; }
};

verdict try_fault(scenario const& what);

}  // namespace torture
