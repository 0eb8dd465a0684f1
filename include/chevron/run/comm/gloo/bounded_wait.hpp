#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chevron/run/comm/shared_memory/shared_memory.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/failure_monitor.hpp>
#include <chevron/run/failure/wait_table.hpp>

/// \file
/// How a rank of `gloo_transport` waits, whatever for.

namespace chevron::detail {

/// Waits that say what for, end at the transport's deadline, and end when any rank fails. What ends without what was waited for
/// is told to all ranks, and thrown.
class bounded_wait {
 public:
  using work_ptr = c10::intrusive_ptr<c10d::Work>;

  bounded_wait(transport const& comm, std::shared_ptr<failure_monitor> watch) : comm_(comm), watch_(std::move(watch)) {}

  /// What this rank has done through the transport, and the transport's name: for the others, to see whether a wait can end.
  void tells(wait_progress const& done, std::string const& transport) { details_ = {{}, &done, &transport}; }
  /// The waits within `work()` need this of other ranks.
  template <class Work>
  decltype(auto) needing(wait_need const& need, Work const& work) {
    struct until_here {
      wait_need& mine;
      ~until_here() { mine = {}; }
    } const end{details_.need = need};
    return work();
  }

  /// Has a wait failed, or was something found that ends all? Then connections are of no further use.
  bool broken() const { return broken_; }
  void set_broken() { broken_ = true; }

  /// Runs something that starts a transfer: Gloo throws at once if the connection is already broken.
  template <class Start>
  work_ptr posting(awaited const& mine, Start const& start) {
    try {
      return start();
    } catch (std::exception const& e) {
      fail(mine, failure_monitor::interruption::none, message_of(e));
    }
  }

  /// For a send or a receive of Gloo's.
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

  /// For a collective of Gloo's, which cannot be aborted: its thread stays behind if it must.
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

  /// For a flag that another thread of this rank sets through the watch.
  void flag(std::atomic<bool> const& done, awaited const& mine) {
    if (done) return;
    begin(mine);
    bool const came = watch_->wait_for(done);
    auto const ended = watch_->end_wait();
    if (!came) fail(mine, ended, "");
  }

  /// For something that others do in shared memory.
  template <class Came>
  void memory(shared_memory& memory, awaited const& mine, Came const& came) {
    if (came()) return;
    auto const last = clock::now() + comm_.deadline();
    begin(mine);
    bool late = false;
    // Short naps: the watch, which knows of failures, does not ring.
    while (!came() && !watch_->failed() && !late) {
      auto const left = last - clock::now();
      memory.sleep(came, std::clamp<clock::duration>(left, std::chrono::milliseconds(0), std::chrono::milliseconds(20)));
      late = left <= clock::duration::zero();
    }
    auto const ended = watch_->end_wait(late);
    if (!came()) fail(mine, ended, "");
  }

  [[noreturn]] void fail(awaited const& mine, failure_monitor::interruption ended, std::string const& what) {
    broken_ = true;
    failure found{.rank = mine.peer, .step = mine.step, .action = mine.action_text(), .reason = ""};
    bool const late = ended == failure_monitor::interruption::deadline || what.find("imed out") != std::string::npos ||
                      what.find("timeout") != std::string::npos;
    if (late) {
      auto const longest = comm_.deadline();
      found.code = static_cast<int>(exit_code::timeout);
      found.reason = mine.peer >= 0 ? no_answer(mine.peer, longest) : not_all_came(found.action, longest);
    } else {
      found.reason = (mine.peer >= 0 ? "rank " + std::to_string(mine.peer) + " was lost" : "a rank was lost in " + found.action) +
                     (what.empty() ? "" : " (" + what + ")");
    }
    throw_failure(watch_->report(found), mine, comm_.topology().global_rank);
  }

 private:
  using clock = failure_monitor::clock;

  // All waits are ended by the watch; Gloo's own timeout, which breaks all its connections, is for the case that the watch hangs
  // (its store does not answer).
  static constexpr auto behind_the_watch = std::chrono::milliseconds(1500);

  void begin(awaited mine, c10d::Work* work = nullptr) {
    mine.within = comm_.doing();
    auto details = details_;
    // A send that waits for room needs that another message is taken; nobody counts that.
    if (mine.is_send() && work == nullptr) details.need = {};
    watch_->begin_wait(mine, comm_.deadline(), work, details);
  }

  transport const& comm_;
  wait_details details_;
  std::shared_ptr<failure_monitor> watch_;
  bool broken_ = false;
};

}  // namespace chevron::detail
