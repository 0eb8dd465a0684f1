#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>

#include <chevron/run/core/error.hpp>

/// \file
/// Raises the limit of open files. Connections are files, and LibTorch hangs if it cannot open one.

namespace chevron::detail {

/// Raises this process's limit of open files for the connections of a job.
/// \param world ranks of the job
/// \throws usage_error where the system's limit is below the number that a rank needs at least
inline void make_room_for_connections(int world) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  rlim_t open = 0;
  std::error_code ignored;
  for (auto const& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    static_cast<void>(entry);
    ++open;
  }
  // Those of the store, its monitor, event loops and shared memory; then two for each other rank, and as a reserve more than
  // twice that.
  auto const others = static_cast<rlim_t>(world);
  rlim_t const least = open + 20 + 2 * others, comfortable = open + 64 + 6 * others;
  if (limit.rlim_cur < comfortable) {
    limit.rlim_cur = std::min(comfortable, limit.rlim_max);
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur >= least) return;
  throw usage_error("this process may have " + std::to_string(limit.rlim_cur) + " files open, and a rank among " +
                    std::to_string(world) + " needs " + std::to_string(least) + ". Remedy: ulimit -n " +
                    std::to_string(comfortable) + ", or what your system calls it");
}

}  // namespace chevron::detail
