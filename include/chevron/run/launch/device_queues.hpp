#pragma once

#include <cstdlib>

/// \file
/// How many streams a GPU takes work from without mixing them up.

namespace chevron::detail {

inline constexpr char const* device_queues = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Has CUDA take the work of streams through 32 queues, the most there are, unless the environment says a number. CUDA reads it
/// when the process first uses a GPU; the environment is the process's, so it is set while there is one thread.
inline void ask_for_device_queues() { ::setenv(device_queues, "32", 0); }

}  // namespace chevron::detail
