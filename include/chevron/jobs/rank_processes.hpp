#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/stop_request.hpp>

/// \file
/// Forks ranks as child processes, monitors, stops and reaps them.

namespace chevron::detail {

/// The ranks that a process forked before it had a second thread. The kernel kills each child when the parent ends.
class rank_processes {
 public:
  /// Forks `count` ranks. \returns the rank in each child, -1 in the parent
  /// \throws usage_error if the process has several threads, or the system refuses to fork
  int fork(int count) {
    if (threads_here() > 1) {
      throw usage_error("ranks cannot be forked: this process already has " + std::to_string(threads_here()) +
                        " threads. Remedy: launch before anything computes");
    }
    std::fflush(nullptr);  // otherwise every child would print the buffered text again
    for (int each : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&watched_, each);
    sigset_t before;
    sigprocmask(SIG_BLOCK, &watched_, &before);
    ::signal(SIGCHLD, SIG_DFL);
    pid_t const parent = ::getpid();
    for (int rank = 0; rank < count; ++rank) {
      pid_t const id = ::fork();
      if (id < 0) {
        std::string const why = std::strerror(errno);
        for (auto const& c : children_) ::kill(c.id, SIGKILL);
        for (auto const& c : children_) ::waitpid(c.id, nullptr, 0);
        sigprocmask(SIG_SETMASK, &before, nullptr);
        throw usage_error("rank " + std::to_string(rank) + " of " + std::to_string(count) + " cannot be forked: " + why +
                          ". Remedy: fewer ranks, or a higher limit of processes (ulimit -u)");
      }
      if (id == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(static_cast<int>(exit_code::peer_lost));  // the parent ended before `prctl`
        sigprocmask(SIG_SETMASK, &before, nullptr);
        children_.clear();
        return rank;
      }
      children_.push_back({id, true});
    }
    return -1;
  }

  /// Times after which children are killed.
  struct options {
    std::chrono::milliseconds grace{2000};        ///< from the first failure to SIGKILL for the remaining children
    std::chrono::milliseconds stop_grace{30000};  ///< between a forwarded SIGTERM or SIGINT and SIGKILL
    std::chrono::milliseconds last{0};            ///< from the first normal end to SIGKILL for the remaining children; 0: never
  };

  /// The exit code of a child that ended by itself; -1 if the child runs or was killed by a signal.
  int code_of(int rank) const {
    auto const at = static_cast<std::size_t>(rank);
    return rank >= 0 && at < children_.size() ? children_[at].code : -1;
  }

  /// Waits for all children. Forwards SIGTERM, SIGHUP, SIGUSR1 and SIGINT, except if the terminal sent the signal, since the
  /// terminal also signals the children.
  /// \param on_failure called as on_failure(rank, code, how) when the first child fails, with the child's exit code and `how`
  /// in words (`killed by signal 9`)
  /// \returns the exit code for this process: 0, the code of the first child that failed, 3 if a signal killed that child, 4 if
  /// a child did not end within `last`, 128 + signal if a signal stopped this process and not all children then ended with 0
  int wait(options const& how, std::function<void(int, int, std::string const&)> const& on_failure) {
    using clock = std::chrono::steady_clock;
    auto kill_at = clock::time_point::max();
    auto late_at = clock::time_point::max();
    int first_failure = 0;
    int stopped_by = 0;
    clock::time_point stopped_at{};
    while (reap([&](int rank, int status) {
      bool const killed = WIFSIGNALED(status);
      if (!killed && WEXITSTATUS(status) == 0) {
        if (how.last.count() > 0) late_at = std::min(late_at, clock::now() + how.last);
        return;
      }
      if (first_failure != 0 || stopped_by != 0) return;
      first_failure = killed ? static_cast<int>(exit_code::peer_lost) : WEXITSTATUS(status);
      kill_at = std::min(kill_at, clock::now() + how.grace);
      on_failure(rank, first_failure,
                 killed ? "killed by signal " + std::to_string(WTERMSIG(status))
                        : "ended with exit code " + std::to_string(WEXITSTATUS(status)));
    })) {
      if (clock::now() >= late_at && first_failure == 0 && stopped_by == 0) {
        first_failure = static_cast<int>(exit_code::timeout);
        kill_at = clock::now();
        auto const late = std::find_if(children_.begin(), children_.end(), [](child const& c) { return c.running; });
        on_failure(static_cast<int>(late - children_.begin()), first_failure,
                   "did not end within " + std::to_string(how.last.count()) + " ms after another had");
      }
      if (clock::now() >= kill_at) {
        send_all(SIGKILL);
        kill_at = clock::time_point::max();
      }
      timespec const slice{.tv_sec = 0, .tv_nsec = 50'000'000};
      siginfo_t info{};
      int const got = sigtimedwait(&watched_, &info, &slice);
      if (got == SIGINT || got == SIGTERM || got == SIGHUP || got == SIGUSR1) {
        // A second signal kills the children at once, unless it follows so soon that it is a duplicate of the first.
        bool const again = stopped_by != 0 && clock::now() > stopped_at + stop_signals::one_signal;
        if (stopped_by == 0) stopped_at = clock::now();
        stopped_by = got;
        if (info.si_code <= 0) send_all(got);  // if a process sent the signal; signals of a terminal have SI_KERNEL
        kill_at = std::min(kill_at, again ? clock::now() : clock::now() + how.stop_grace);
      }
    }
    if (first_failure != 0) return first_failure;
    return stopped_by != 0 && !all_ended_well_ ? 128 + stopped_by : 0;
  }

 private:
  struct child {
    pid_t id;
    bool running;
    int code = -1;
  };

  static int threads_here() {
    std::error_code none;
    return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task", none), {}));
  }

  void send_all(int signal) {
    // A stopped process handles a signal other than SIGKILL only after SIGCONT. SIGCONT follows once all children have the
    // signal, so that no child ends earlier than another.
    for (int const each : {signal, SIGCONT}) {
      for (auto const& c : children_) {
        if (c.running && (each != SIGCONT || signal != SIGKILL)) ::kill(c.id, each);
      }
    }
  }

  /// Reaps ended children and calls `told(rank, status)` for each. \returns false once no child runs
  template <class Told>
  bool reap(Told const& told) {
    bool any = false;
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      auto& c = children_[rank];
      if (!c.running) continue;
      int status = 0;
      pid_t const got = ::waitpid(c.id, &status, WNOHANG);
      if (got == c.id) {
        c.running = false;
        if (WIFEXITED(status)) c.code = WEXITSTATUS(status);
        all_ended_well_ = all_ended_well_ && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        told(static_cast<int>(rank), status);
      }
      any = any || c.running;
    }
    return any;
  }

  std::vector<child> children_;
  sigset_t watched_ = [] {
    sigset_t none;
    sigemptyset(&none);
    return none;
  }();
  bool all_ended_well_ = true;
};

}  // namespace chevron::detail
