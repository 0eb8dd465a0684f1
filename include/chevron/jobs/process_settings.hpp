#pragma once

#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>

#include <chevron/run/core/error.hpp>

/// \file
/// Settings of a rank's process: reuse of freed memory, queues of GPUs, open files.

namespace chevron {

/// Makes malloc keep freed memory in this process, since the next step allocates the same amount again. Memory returned to the
/// system is zeroed and mapped again by page faults, which took one thirtieth of the processor time of a small GPT. Blocks
/// above 32 MB are still returned. No effect if the environment configures malloc, or the C library is not glibc.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  char const* const tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr) return;
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr || std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr) return;
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value allowed
  ::mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

namespace detail {

inline constexpr char const* device_queues = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Requests 32 hardware queues for CUDA streams, the maximum, unless the environment sets a number. CUDA reads the variable at
/// the process's first use of a GPU. Must be called while the process has one thread, since all threads share the environment.
inline void ask_for_device_queues() { ::setenv(device_queues, "32", 0); }

/// Opens /dev/null for closed standard files. Otherwise a file or connection opened later would get the number of a standard
/// file, and receive printed text.
inline void open_standard_files() {
  for (int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(file, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) < 0) return;
  }
}

/// Raises this process's limit of open files for the connections of a job.
/// \param world ranks of the job
/// \throws usage_error if the system's limit is below the least number that a rank needs
inline void make_room_for_connections(int world) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  std::error_code ignored;
  auto const open = static_cast<rlim_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd", ignored), {}));
  // Files of the store, its monitor, event loops and shared memory, and two for each other rank; `comfortable` adds a reserve
  // of more than twice as many.
  auto const others = static_cast<rlim_t>(world);
  rlim_t const least = open + 20 + 2 * others, comfortable = open + 64 + 6 * others;
  if (limit.rlim_cur < comfortable) {
    limit.rlim_cur = std::min(comfortable, limit.rlim_max);
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur >= least) return;
  throw usage_error("this process may have " + std::to_string(limit.rlim_cur) + " files open, and a rank among " +
                    std::to_string(world) + " needs " + std::to_string(least) + ". Remedy: ulimit -n " +
                    std::to_string(comfortable) + ", or the system's own setting of that limit");
}

}  // namespace detail
}  // namespace chevron
