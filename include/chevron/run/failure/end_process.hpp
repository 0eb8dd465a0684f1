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
/// Ends a failed process after its last messages, without a wait that could hang.

namespace chevron::detail {

/// Writes torchrun's error file, of which torchrun prints only `py_callstack`.
inline void write_torchrun_error(std::string const& message) {
  char const* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == 0) return;
  std::ofstream(path) << R"({"message":{"message":)" << json_text(message) << R"(,"extraInfo":{"py_callstack":)"
                      << json_text(message) << R"(,"timestamp":")" << std::time(nullptr) << R"("}}})";
}

/// Flushes all files, for at most half a second: a thread that hangs in reading a file keeps the file locked.
inline void flush_files() {
  do_within(std::chrono::milliseconds(500), [] { std::fflush(nullptr); });
}

/// Writes a line to stderr without taking its lock.
inline void say_at_the_end(std::string const& message) {
  auto const line = message + "\n";
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) {
    // stderr cannot be written; the exit code reports the failure, too.
  }
}

/// Ends this process at once, in any state of its threads, with a message on stderr and for torchrun.
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
  /// The rank that threw `other`; -1 for another exception.
  int of(std::exception_ptr const& other) const { return what && what == other ? rank : -1; }
};
inline thread_local thrown_by_rank last_thrown;

}  // namespace chevron::detail
