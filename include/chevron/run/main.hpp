#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string>
#include <utility>

#include <chevron/run/error.hpp>
#include <chevron/run/kept_memory.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/run/watch.hpp>

/// \file
/// The last line of defence of a program: whatever is thrown becomes a message, a report to the other ranks and an exit code.

namespace chevron {

namespace detail {

/// Where a program was started with standard input, output or errors closed, the next file or connection to be opened would take
/// that place, and what is printed would go into it.
inline void open_standard_files() {
  for (int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(file, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) < 0) return;
  }
}

inline std::string json_text(std::string const& plain) {
  std::string out = "\"";
  for (char const c : plain) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

/// torchrun prints, of the file it asked for, `py_callstack` only.
inline void write_torchrun_error(std::string const& message) {
  char const* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == 0) return;
  std::ofstream(path) << R"({"message":{"message":)" << json_text(message) << R"(,"extraInfo":{"py_callstack":)"
                      << json_text(message) << R"(,"timestamp":")" << std::time(nullptr) << R"("}}})";
}

/// Ends a failing rank: tells stderr, torchrun and the other ranks. Not by `exit`: destroying what a broken job has open may
/// hang. With `quiet` the program has said itself what is wrong.
[[noreturn]] inline void end_failing(std::string const& message, int code, place const& where, bool quiet = false) {
  std::fflush(nullptr);
  if (!quiet) std::fprintf(stderr, "%s\n", message.c_str());
  write_torchrun_error(message);
  if (auto const watch = kept_watch) {
    auto const rank = watch->rank();
    auto const name = "rank " + std::to_string(rank);
    if (!watch->failed() && watch->world() > 1) {
      // Others learn the text itself; its own place is cut off if it names this rank already.
      watch->report({.code = code,
                     .rank = rank,
                     .step = where.step,
                     .action = where.action,
                     .reason = message.starts_with(name) ? message : name + " ended: " + message});
    }
    watch->linger();
  }
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace detail

/// Runs `body(argc, argv)`, which returns an exit code, and ends the process as DESIGN's exit codes say: 0 ok, 2 usage, 3 peer
/// lost, 4 timeout, 5 preflight, 6 numerical, 7 checkpoint, 1 anything else. A rank that computes while another fails is ended
/// after 1.5 s. Memory that steps free is kept for the next (kept_memory.hpp).
///
///     int main(int argc, char** argv) { return chevron::run_main(argc, argv, [](int argc, char** argv) { …; return 0; }); }
template <class Body>
int run_main(int argc, char** argv, Body&& body) {
  detail::open_standard_files();
  detail::keep_watch = true;
  keep_freed_memory();
  int code = 0;
  try {
    code = body(argc, argv);
  } catch (error const& e) {
    detail::end_failing(e.what(), e.code(), e.where());
  } catch (std::exception const& e) {
    detail::end_failing(detail::message_of(e), 1, {});
  } catch (...) {
    detail::end_failing("something was thrown that is not an exception", 1, {});
  }
  if (code != 0 && detail::kept_watch) detail::end_failing("exit code " + std::to_string(code), code, {}, true);
  if (auto const watch = std::exchange(detail::kept_watch, nullptr)) watch->finish();
  return code;
}

}  // namespace chevron
