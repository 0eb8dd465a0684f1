#pragma once

#include <cstdio>
#include <cstdlib>

/// \file
/// Reports an error of headers that need no LibTorch: by an exception or, compiled without exceptions, by an abort.

namespace chevron::detail {

/// Throws `problem`. In a program compiled without exceptions, writes its message to standard error and aborts.
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
