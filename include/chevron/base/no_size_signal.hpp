#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

/// \file
/// Turns writes beyond the limit on the size of files into errors.

namespace chevron::detail {

/// Blocks SIGXFSZ in this thread while the object lives: a write beyond the limit on the size of files (`ulimit -f`) then fails
/// with an error, and the signal does not end the process. The limit also applies to `ftruncate`, and to files in memory.
class no_size_signal {
 public:
  no_size_signal() {
    sigemptyset(&only_);
    sigaddset(&only_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &only_, &before_);
  }
  ~no_size_signal() {
    if (sigismember(&before_, SIGXFSZ) == 1) return;
    timespec const at_once{};
    while (::sigtimedwait(&only_, nullptr, &at_once) > 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  no_size_signal(no_size_signal const&) = delete;
  no_size_signal& operator=(no_size_signal const&) = delete;

 private:
  sigset_t only_, before_;
};

}  // namespace chevron::detail
