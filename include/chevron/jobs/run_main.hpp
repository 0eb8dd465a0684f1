#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/jobs/process_settings.hpp>
#include <chevron/run/core/end_process.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/flight_log.hpp>

/// \file
/// The outermost function of a program: turns exceptions into a message, a report to the other ranks and an exit code.

namespace chevron {

namespace detail {

/// Ends a failing rank by `_exit`, since destroying the objects of a broken job may hang. First writes torchrun's error
/// file, publishes the failure, prints the message (on one rank of a job; a short line on the others), and writes flight logs.
/// \param message the error's `what()` \param mine the same error as a failure \param quiet the program has printed the message
[[noreturn]] inline void end_failing(std::string const& message, failure const& mine, bool quiet = false) {
  flush_files();
  write_torchrun_error(message);
  std::string line = message;
  auto const watch = kept_watch;
  bool const in_job = watch && watch->world() > 1;
  failure const first = in_job ? watch->report(mine) : mine;
  if (in_job && !quiet) line = watch->line_at_the_end(message, mine, first);
  if (!quiet) say_at_the_end(line);
  if (line != message) write_torchrun_error(line, line.starts_with(message) ? 0 : 1);
  if (in_job) write_flight_logs(first, watch->rank(), {watch->world(), 1, watch->rank()});
  if (watch) watch->linger();
  write_flight_logs(mine, -1);
  flush_files();
  ::_exit(mine.code);
}

/// Ends the process after the current exception, which is not Chevron's. The message names the rank that threw it, if known.
[[noreturn]] inline void end_failing_by_other(std::string const& message) {
  int rank = last_thrown.of(std::current_exception());
  if (rank < 0 && kept_watch && kept_watch->world() > 1) rank = kept_watch->rank();
  failure const mine = failure_by(std::max(0, rank), message, static_cast<int>(exit_code::other), {});
  end_failing(rank < 0 ? message : mine.reason, mine);
}

}  // namespace detail

/// Runs `body(argc, argv)` and turns errors into exit codes (docs/reference/errors.md): 0 ok, 2 usage, 3 peer lost, 4 timeout, 5
/// preflight, 6 numerical, 7 checkpoint, 1 any other error. If another rank fails, this rank ends with the
/// failed rank's code; if it is still computing 1.5 s later, it is ended. Memory freed by a step is kept for the next step, and
/// a GPU gets 32 queues for streams (process_settings.hpp). If `body` throws, the process ends without destroying static
/// objects.
/// \param body takes `(int, char**)` and returns an exit code; an exception is printed on stderr as one line
/// \returns the result of `body`; if the result is not 0, a rank of `launch` publishes a failure and ends here instead
///
///     int main(int argc, char** argv) { return chevron::run_main(argc, argv, [](int argc, char** argv) { …; return 0; }); }
template <class Body>
int run_main(int argc, char** argv, Body&& body) {
  detail::open_standard_files();
  ::signal(SIGXFSZ, SIG_IGN);  // a write to a file that reached the limit then fails with an error
  detail::keep_watch = true;
  keep_freed_memory();
  detail::ask_for_device_queues();
  int code = 0;
  try {
    code = body(argc, argv);
  } catch (error const& e) {
    detail::end_failing(e.what(), detail::failure_by(detail::kept_watch ? detail::kept_watch->rank() : 0, e));
  } catch (std::exception const& e) {
    detail::end_failing_by_other(detail::message_of(e));
  } catch (...) {
    detail::end_failing_by_other("an object that is no std::exception was thrown");
  }
  if (code != 0 && detail::kept_watch) {
    std::string const words = "exit code " + std::to_string(code);
    detail::end_failing(words, detail::failure_by(detail::kept_watch->rank(), words, code, {}), true);
  }
  if (auto const watch = std::exchange(detail::kept_watch, nullptr)) watch->finish();
  return code;
}

}  // namespace chevron
