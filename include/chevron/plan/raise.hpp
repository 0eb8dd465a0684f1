#pragma once

#include <cstdio>
#include <cstdlib>

/// \file
/// How the schedule side ends what cannot go on, with exceptions or without.

namespace chevron::detail {

/// Throws the problem. A program compiled without exceptions says it on standard error and aborts.
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
