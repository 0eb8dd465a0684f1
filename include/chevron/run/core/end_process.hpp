#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <string>
#include <system_error>

#include <chevron/base/format.hpp>
#include <chevron/base/new_file.hpp>
#include <chevron/run/core/bounded_work.hpp>

/// \file
/// Ends a failed process after printing its last messages, without calls that could hang.

namespace chevron::detail {

/// Writes a message to torchrun's error file, also as `py_callstack`, the only part of the file that torchrun prints.
/// \param behind seconds added to the time: torchrun takes the earliest error, in whole seconds, for the root cause
inline void write_torchrun_error(std::string const& message, int behind = 0) {
  char const* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == 0) return;
  std::string const words = show::json_string(message);
  try {
    write_file(path, R"({"message":{"message":)" + words + R"(,"extraInfo":{"py_callstack":)" + words + R"(,"timestamp":")" +
                         std::to_string(std::time(nullptr) + behind) + R"("}}})");
  } catch (std::system_error const&) {
    // stderr and the exit code report the failure, too.
  }
}

/// Flushes all files. Gives up after half a second, since a thread that hangs while reading a file keeps the file locked.
inline void flush_files() {
  do_within(std::chrono::milliseconds(500), [] { std::fflush(nullptr); });
}

/// Writes a line to stderr without taking the lock of stderr, which a hanging thread may hold.
inline void say_at_the_end(std::string const& message) {
  auto const line = message + "\n";
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) {
    // stderr cannot be written; the exit code reports the failure, too.
  }
}

/// Ends this process at once, whatever its threads do, after writing a message to stderr and for torchrun.
[[noreturn]] inline void end_process(std::string const& message, int code) {
  flush_files();
  say_at_the_end(message);
  write_torchrun_error(message);
  ::_exit(code);
}

/// The exception that `run_threads` rethrew, and the rank whose body threw it.
struct thrown_by_rank {
  std::exception_ptr what;
  int rank = -1;
  /// The rank whose body threw `other`; -1 if `other` is a different exception.
  int of(std::exception_ptr const& other) const { return what && what == other ? rank : -1; }
};
inline thread_local thrown_by_rank last_thrown;

}  // namespace chevron::detail
