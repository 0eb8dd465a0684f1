#pragma once

#include <signal.h>
#include <string.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/core/now_ns.hpp>

/// \file
/// Requests to end training after the current step, by a signal, a time limit or the program. The trainer sends a request to all
/// ranks with the numbers of the step, so all ranks stop after the same step (`trainer::should_stop`).

namespace chevron {

namespace detail {

/// Causes of a stop other than signals. An `int` cause is one of these or a signal's number (above 0); 0: no stop.
enum stop_cause : int { stop_asked_by_program = -1, stop_asked_by_clock = -2 };

inline std::atomic<int> stop_wish = 0;
inline std::atomic<std::int64_t> stop_at = std::numeric_limits<std::int64_t>::max();  // in ns, by now_ns()
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free, "signals write to these");

inline void wish_to_stop(int cause) {
  int none = 0;
  stop_wish.compare_exchange_strong(none, cause);
}

/// The cause for which this process is asked to stop: a `stop_cause` or a signal's number; 0: none.
inline int stop_cause_now() {
  if (now_ns() >= stop_at.load()) wish_to_stop(stop_asked_by_clock);
  return stop_wish.load();
}

inline std::string stop_words(int cause) {
  if (cause == stop_asked_by_program) return "asked for it";
  if (cause == stop_asked_by_clock) return "came to its time limit";
  char const* const name = ::strsignal(cause);
  return "was sent signal " + std::to_string(cause) + (name == nullptr ? "" : " (" + std::string(name) + ")");
}

}  // namespace detail

/// Asks all ranks to stop after the current step, like a signal that `stop_signals` handles.
inline void request_stop() { detail::wish_to_stop(detail::stop_asked_by_program); }

/// Asks all ranks to stop after the step in which a time limit passes, so that the job saves before a batch system's limit.
/// \param limit time from now; leave enough before the batch system's limit for the longest step and for saving
inline void request_stop_after(std::chrono::milliseconds limit) {
  detail::stop_at = now_ns() + static_cast<std::int64_t>(limit.count()) * 1'000'000;
}

/// Handles signals while the object lives: the first signal requests a stop, a second signal has its default effect and ends
/// the process at once. Create the object before launching ranks, so that forked ranks inherit the handlers and no earlier
/// signal ends them; call `trainer::should_stop` after each step, then save.
///
///     chevron::stop_signals const stop;
///     …
///     while (trainer.next_step() < steps && !trainer.should_stop()) trainer.step(x, y);
///     chevron::save_checkpoint(trainer, folder);
class stop_signals {
 public:
  /// Signals within this time count as one: a rank may receive Ctrl-C twice, from the terminal, which signals the process
  /// group, and from the launcher.
  static constexpr std::chrono::milliseconds one_signal{2000};

  /// \param signals to handle; batch systems send SIGUSR1 before their time limit, and mpirun forwards it
  explicit stop_signals(std::initializer_list<int> signals = {SIGTERM, SIGINT, SIGUSR1}) {
    struct sigaction ask {};
    ask.sa_handler = on_signal;
    sigemptyset(&ask.sa_mask);
    ask.sa_flags = SA_RESTART;  // interrupted system calls restart
    for (int const each : signals) {
      struct sigaction old {};
      if (::sigaction(each, &ask, &old) == 0) before_.emplace_back(each, old);
    }
  }
  stop_signals(stop_signals const&) = delete;
  stop_signals& operator=(stop_signals const&) = delete;
  ~stop_signals() {
    for (auto const& [each, old] : before_) ::sigaction(each, &old, nullptr);
  }

 private:
  static inline std::atomic<std::int64_t> first_at_ = 0;

  static void on_signal(int which) {
    int const kept = errno;
    std::int64_t const now = now_ns();
    std::int64_t first = 0;
    if (!first_at_.compare_exchange_strong(first, now) && now - first > one_signal.count() * 1'000'000) {
      ::signal(which, SIG_DFL);
      ::raise(which);  // takes effect when this handler returns
    }
    detail::wish_to_stop(which);
    errno = kept;
  }

  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace chevron
