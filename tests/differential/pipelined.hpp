#pragma once

#include <string>

#include "outcome.hpp"
#include "program.hpp"

namespace differential {

struct pipelined_run {
  outcome what;
  std::string thrown;  ///< by the first rank that failed by itself; empty: none
};

/// The program by Chevron, with the ranks in threads of this process.
pipelined_run run_pipelined(program const& p);

/// The same with a process for each rank; this process must not have computed anything yet. `folder` must be there.
pipelined_run run_forked(program const& p, std::string const& folder);

}  // namespace differential
