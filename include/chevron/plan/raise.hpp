#pragma once

#include <cstdio>
#include <cstdlib>

/// \file
/// Ends the schedule side's work with an error, with exceptions or without.

namespace chevron::detail {

/// Throws the problem. In a program compiled without exceptions, writes it to standard error and aborts.
template <class Problem>
[[noreturn]] void raise(Problem const& problem) {
#ifdef __cpp_exceptions
  throw problem;
#else
  std::fprintf(stderr, "chevron: %s\n", problem.what());
  std::abort();
#endif
}

}  // namespace chevron::detail
