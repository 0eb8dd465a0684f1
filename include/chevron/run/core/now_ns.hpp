#pragma once

#include <cstdint>
#include <ctime>

/// \file
/// The clock for time stamps, comparable between threads and processes.

namespace chevron {

/// Nanoseconds of the steady clock, comparable between threads and between processes of one machine. May be called within a
/// signal handler.
inline std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace chevron
