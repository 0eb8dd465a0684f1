#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string>

#include <chevron/run/core/bounded_work.hpp>
#include <chevron/run/core/json_text.hpp>

/// \file
/// How a process ends that has failed: what is said last, to whom, and how it never hangs.

namespace chevron::detail {

/// torchrun prints, of the file it asked for, `py_callstack` only.
inline void write_torchrun_error(std::string const& message) {
  char const* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == 0) return;
  std::ofstream(path) << R"({"message":{"message":)" << json_text(message) << R"(,"extraInfo":{"py_callstack":)"
                      << json_text(message) << R"(,"timestamp":")" << std::time(nullptr) << R"("}}})";
}

/// Writes what the program has printed, for at most half a second: a thread that hangs in reading a file keeps that file locked.
inline void flush_files() {
  do_within(std::chrono::milliseconds(500), [] { std::fflush(nullptr); });
}

/// Writes a line to stderr, past its lock.
inline void say_at_the_end(std::string const& message) {
  auto const line = message + "\n";
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) {
    // Nobody listens; the exit code tells it all the same.
  }
}

/// Ends this process at once, whatever its threads do: tells stderr and torchrun.
[[noreturn]] inline void end_process(std::string const& message, int code) {
  flush_files();
  say_at_the_end(message);
  write_torchrun_error(message);
  ::_exit(code);
}

/// The rank whose body threw what `run_threads` throws again; -1 if another exception is asked for.
struct thrown_by_rank {
  std::exception_ptr what;
  int rank = -1;
  int of(std::exception_ptr const& other) const { return what && what == other ? rank : -1; }
};
inline thread_local thrown_by_rank last_thrown;

}  // namespace chevron::detail
