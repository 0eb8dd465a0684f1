#pragma once

#include <cstdint>
#include <ctime>

/// \file
/// The clock that everything is timed with.

namespace chevron {

/// Nanoseconds of the steady clock: comparable between the threads of a process and between processes of one machine. May be
/// called within a signal handler.
inline std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace chevron
