#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#if !__has_include(<gloo/context.h>)
#error "Gloo's headers are missing (LibTorch's wheel lacks them). Remedy: include path <include>/chevron/transports/gloo/shim"
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <ATen/core/ivalue.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

/// \file
/// Waits of a `gloo_transport` for messages, collectives and shared memory.

namespace chevron::detail {

/// Waits, at most until the transport's deadline or until any rank fails; other ranks can read the current wait. A wait that
/// ends without a result publishes a failure to all ranks, and throws.
class bounded_wait {
 public:
  using work_ptr = c10::intrusive_ptr<c10d::Work>;

  bounded_wait(transport const& comm, std::shared_ptr<failure_monitor> watch) : comm_(comm), watch_(std::move(watch)) {}

  /// Makes waits publish this rank's counts, by which other ranks detect waits that cannot end.
  /// \param done counts of this rank, updated by the transport \param transport the prefix of the transport's keys
  void tells(wait_progress const& done, std::string const& transport) { details_ = {{}, &done, &transport}; }
  /// Runs `work()`, whose waits need this count of other ranks. \returns the result of `work`
  template <class Work>
  decltype(auto) needing(wait_need const& need, Work const& work) {
    details_.need = need;
    auto const end = c10::make_scope_exit([this] { details_.need = {}; });
    return work();
  }

  /// Whether a wait has failed, or a failure was found otherwise: connections cannot be used any more.
  bool broken() const { return broken_; }
  void set_broken() { broken_ = true; }

  /// Runs `start()`, which starts a transfer and throws at once if Gloo's connection is broken already.
  /// \returns the result of `start` \throws the error of a failed wait
  template <class Start>
  work_ptr posting(awaited const& mine, Start const& start) {
    try {
      return start();
    } catch (std::exception const& e) {
      fail(mine, failure_monitor::interruption::none, message_of(e));
    }
  }

  /// Waits for a send or receive of Gloo.
  void work(c10d::Work& under_way, awaited const& mine) {
    auto const longest = comm_.deadline();
    begin(mine, &under_way);
    bool done = false;
    std::string what;
    try {
      done = under_way.wait(longest + behind_the_watch);
    } catch (std::exception const& e) {
      what = message_of(e);
    }
    auto const ended = watch_->end_wait();
    if (!done) fail(mine, ended, what);
  }

  /// Waits for a collective of Gloo. Collectives cannot be aborted: after a failure, Gloo's thread continues to run.
  void collective(work_ptr under_way, awaited const& mine) {
    auto const done = std::make_shared<std::atomic<bool>>(false);
    under_way->getFuture()->addCallback([done, watch = watch_](c10::ivalue::Future&) { watch->wake(*done); });
    flag(*done, mine);
    try {
      under_way->wait();
    } catch (std::exception const& e) {
      fail(mine, failure_monitor::interruption::none, message_of(e));
    }
  }

  /// Waits for a flag that another thread of this rank sets by `failure_monitor::wake`.
  void flag(std::atomic<bool> const& done, awaited const& mine) {
    if (done) return;
    begin(mine);
    bool const came = watch_->wait_for(done);
    auto const ended = watch_->end_wait();
    if (!came) fail(mine, ended, "");
  }

  /// Waits until `came()`, which reads shared memory that other ranks write, returns true. Spins before it sleeps where each rank
  /// of the machine can have a processor.
  template <class Came>
  void memory(shared_memory& memory, awaited const& mine, Came const& came) {
    if (came() || (memory.has_processors() && comes_soon(came))) return;
    auto const last = clock::now() + comm_.deadline();
    begin(mine);
    bool late = false;
    // Sleeps 20 ms at most at a time, since the failure monitor does not wake this futex after a failure.
    while (!came() && !watch_->failed() && !late) {
      auto const left = last - clock::now();
      memory.sleep(came, std::clamp<clock::duration>(left, std::chrono::milliseconds(0), std::chrono::milliseconds(20)));
      late = left <= clock::duration::zero();
    }
    auto const ended = watch_->end_wait(late);
    if (!came()) fail(mine, ended, "");
  }

  /// Publishes the failure of a wait, and throws the failure that was published first.
  /// \param ended why the monitor ended the wait \param what the message of Gloo's exception
  [[noreturn]] void fail(awaited const& mine, failure_monitor::interruption ended, std::string const& what) {
    broken_ = true;
    bool const late = ended == failure_monitor::interruption::deadline || what.find("imed out") != std::string::npos ||
                      what.find("timeout") != std::string::npos;
    failure found = timeout_of(mine, comm_.deadline());
    if (!late) {
      found.code = static_cast<int>(exit_code::peer_lost);
      found.reason = (mine.peer >= 0 ? "rank " + std::to_string(mine.peer) + " was lost" : "a rank was lost in " + found.action) +
                     (what.empty() ? "" : " (" + what + ")");
    }
    throw_failure(watch_->report(found), mine, comm_.topology().global_rank);
  }

 private:
  using clock = failure_monitor::clock;

  // Normally the failure monitor ends waits. Gloo's own timeout, which breaks all its connections, ends a wait this much later,
  // in case the monitor hangs because the store does not answer.
  static constexpr auto behind_the_watch = std::chrono::milliseconds(1500);

  // A sleep costs the sender a system call, and the receiver the time until the kernel runs it again.
  static constexpr auto longest_spin = std::chrono::microseconds(50);

  /// Spins. \returns whether `came()` returned true within `longest_spin`
  template <class Came>
  static bool comes_soon(Came const& came) {
    auto const last = clock::now() + longest_spin;
    do {
      for (int i = 0; i < 20; ++i) pause();
      if (came()) return true;
    } while (clock::now() < last);
    return false;
  }
  /// Leaves the processor's units to its other hyperthread for some cycles.
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void begin(awaited mine, c10d::Work* work = nullptr) {
    mine.within = comm_.doing();
    auto details = details_;
    // A send that waits for room needs a receiver to take any message; no count of receivers tells this.
    if (mine.is_send() && work == nullptr) details.need = {};
    watch_->begin_wait(mine, comm_.deadline(), work, details);
  }

  transport const& comm_;
  wait_details details_;
  std::shared_ptr<failure_monitor> watch_;
  bool broken_ = false;
};

}  // namespace chevron::detail
