#pragma once

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/core/now_ns.hpp>

/// \file
/// The wish that training ends after the step under way: a signal's, the clock's or the program's. A trainer tells it to all
/// ranks with the numbers of the step, so all of them stop after the same one (`trainer::should_stop`).

namespace chevron {

namespace detail {

/// Why this process is to stop: 0 not at all, above 0 the number of a signal, else one of these.
enum stop_cause : int { stop_asked_by_program = -1, stop_asked_by_clock = -2 };

inline std::atomic<int> stop_wish = 0;
inline std::atomic<std::int64_t> stop_at = std::numeric_limits<std::int64_t>::max();  // as now_ns()
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free, "signals write to these");

inline void wish_to_stop(int cause) {
  int none = 0;
  stop_wish.compare_exchange_strong(none, cause);
}

/// \returns the `stop_cause` or signal that this process knows of; 0: it may go on
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

/// Asks all ranks to stop after the step under way, as a signal would.
inline void request_stop() { detail::wish_to_stop(detail::stop_asked_by_program); }

/// The same when so much time has passed: before a batch system's limit does worse.
/// \param limit from now; leave time for the longest step and for saving
inline void request_stop_after(std::chrono::milliseconds limit) {
  detail::stop_at = now_ns() + static_cast<std::int64_t>(limit.count()) * 1'000'000;
}

/// While it lives, the first of these signals only asks for a stop, and a second one ends the process at once, as it would
/// without. Make it before the ranks are launched, so that forked ranks have it, too, and no signal comes before; call
/// `trainer::should_stop` after each step, and save.
///
///     chevron::stop_signals const stop;
///     …
///     while (trainer.next_step() < steps && !trainer.should_stop()) trainer.step(x, y);
///     chevron::save_checkpoint(trainer, folder);
class stop_signals {
 public:
  /// Launchers and terminals send the same signal to a process twice, the one to its group and the other to each rank. Signals
  /// count as one within this time.
  static constexpr std::chrono::milliseconds one_signal{2000};

  /// \param signals SIGUSR1 is what batch systems send before their limit, and what mpirun hands on
  explicit stop_signals(std::initializer_list<int> signals = {SIGTERM, SIGINT, SIGUSR1}) {
    struct sigaction ask {};
    ask.sa_handler = on_signal;
    sigemptyset(&ask.sa_mask);
    ask.sa_flags = SA_RESTART;  // no call of anybody's is cut short
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
