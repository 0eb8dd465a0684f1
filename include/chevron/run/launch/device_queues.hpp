#pragma once

#include <cstdlib>

/// \file
/// Sets the number of hardware queues of a GPU, so that streams do not wait for each other in one queue.

namespace chevron::detail {

inline constexpr char const* device_queues = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Requests 32 queues for CUDA streams, the largest number, unless the environment sets one. CUDA reads the variable at the
/// process's first use of a GPU. To be called while there is one thread, since the environment is the process's.
inline void ask_for_device_queues() { ::setenv(device_queues, "32", 0); }

}  // namespace chevron::detail
