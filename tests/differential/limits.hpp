#pragma once

#include <string>

#include "program.hpp"

/// \file
/// Programs whose bits need not be equal, and programs that may be refused; each with its reason.

namespace differential {

/// Why this program is not to be compared; empty: it is.
std::string not_promised(program const& p);

/// Must Chevron refuse this program, and with which words in its message? Empty: no.
std::string must_refuse(program const& p);

/// May this be said of this program? A message that is no fault.
bool may_refuse(program const& p, std::string const& message);

/// Does a stage compute anything again?
bool recomputes(stage_text const& s);

/// May gradients be added, or lie in memory, otherwise than in one graph: since a value crosses a cut more than once, or a view
/// of an earlier stage's is changed in place? Then the program is to be equal to the loop that cuts its graph where the stages
/// are.
bool rounds_as_cut(program const& p);

}  // namespace differential
