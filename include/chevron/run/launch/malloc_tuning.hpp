#pragma once

#include <malloc.h>

#include <cstdlib>
#include <cstring>

/// \file
/// Memory from step to step.

namespace chevron {

/// Has malloc keep what this process frees. A step frees what its forwards took, and the next one takes as much again: given
/// back to the system in between, every page comes back by a fault and is zeroed, which took one thirtieth of the processor
/// time of a small GPT. Blocks above 32 MB still go back. Leaves alone what the environment says about malloc, and does nothing
/// where the C library is not glibc.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  char const* const tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr) return;
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr || std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr) return;
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most it takes
  ::mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

}  // namespace chevron
