#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>

#include <chevron/run/core/error.hpp>

/// \file
/// How many files a rank may have open. Connections are files, and LibTorch hangs where it cannot make one.

namespace chevron::detail {

/// Makes room for the connections of a job, by raising this process's limit as far as it may itself.
/// \param world ranks of the job
/// \throws usage_error where what a rank surely needs is not allowed
inline void make_room_for_connections(int world) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  rlim_t open = 0;
  std::error_code ignored;
  for (auto const& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    static_cast<void>(entry);
    ++open;
  }
  // The store's, its watch's, those of event loops and of shared memory; then two for each other rank, and twice that for
  // comfort.
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
