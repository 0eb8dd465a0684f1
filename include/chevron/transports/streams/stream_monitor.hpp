#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/ScopeExit.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/transports/streams/stream_fault.hpp>

/// \file
/// Monitors the operations of streams: the host does not wait for them, so a thread must detect operations that never end.

namespace chevron::detail {

/// A thread of one rank that checks 50 times a second which operations have ended. If no operation ends within the deadline, or
/// a stream reports a fault, the thread publishes a failure. After a failure of any rank is published, the thread aborts all
/// operations of this rank (`Streams::abort`).
template <class Streams>
class stream_monitor {
 public:
  using stream = typename Streams::stream;
  using event = typename Streams::event;
  using clock = failure_monitor::clock;
  using milliseconds = std::chrono::milliseconds;

  /// An event at the end of a stream's operation.
  class point {
   public:
    explicit point(stream_monitor& owner) : owner_(&owner), at_(owner.streams_->make_event()) {
      std::lock_guard const hold(owner_->mutex_);
      owner_->points_.push_back(this);
    }
    ~point() {
      std::lock_guard const hold(owner_->mutex_);
      std::erase(owner_->points_, this);
    }
    point(point const&) = delete;
    point& operator=(point const&) = delete;

    /// Records the end of the operation enqueued last. \param on its stream \param about its description, for errors
    void record(stream& on, awaited const& about) {
      std::lock_guard const hold(owner_->mutex_);
      owner_->streams_->record(at_, on);
      about_ = about;
      order_ = ++owner_->asked_;
      if (!owner_->busy_) owner_->last_end_ = clock::now();
      owner_->busy_ = busy_ = true;
      seen_done_ = false;
    }
    /// Whether the monitor found that the operation ended before any rank aborted its streams. If so, the result is valid
    /// whatever fails later, and no deadline applies.
    bool seen_done() const { return seen_done_; }
    /// The event, for waits outside of the monitor; `record` must not be called during such a wait.
    event const& at() const { return at_; }
    awaited const& about() const { return about_; }

   private:
    friend stream_monitor;
    stream_monitor* owner_;
    event at_;
    awaited about_{};
    std::uint64_t order_ = 0;
    bool busy_ = false;
    std::atomic<bool> seen_done_{false};
  };

  /// Tells the monitor that the host is in a call that may wait for other ranks: a call that joins a channel, or connects a
  /// channel at its first use. The monitor applies the deadline to the call as to an operation.
  class host_call {
   public:
    host_call(stream_monitor& owner, awaited const& about) : owner_(owner) {
      std::lock_guard const hold(owner_.mutex_);
      owner_.call_ = about;
      owner_.call_order_ = ++owner_.asked_;
      owner_.call_begin_ = clock::now();
    }
    ~host_call() {
      std::lock_guard const hold(owner_.mutex_);
      owner_.call_order_ = 0;
      owner_.last_end_ = clock::now();
    }
    host_call(host_call const&) = delete;
    host_call& operator=(host_call const&) = delete;

   private:
    stream_monitor& owner_;
  };

  stream_monitor(Streams& streams, failure_monitor& failures) : streams_(&streams), failures_(&failures) {
    thread_ = std::thread([this] { run(); });
  }
  ~stream_monitor() {
    {
      std::lock_guard const hold(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
    failures_->expect_no_beat();
  }
  stream_monitor(stream_monitor const&) = delete;
  stream_monitor& operator=(stream_monitor const&) = delete;

  /// Sets the longest time without the end of an operation; initially 5 minutes.
  void deadline(milliseconds longest) {
    std::lock_guard const hold(mutex_);
    deadline_ = longest;
  }

  /// Whether all recorded operations have ended.
  bool idle() {
    std::lock_guard const hold(mutex_);
    return std::none_of(points_.begin(), points_.end(), [&](point* p) { return p->busy_ && !streams_->passed(p->at_); });
  }

 private:
  static constexpr auto look_again = milliseconds(20);

  void run() {
    streams_->enter_thread();
    std::unique_lock hold(mutex_);
    while (!stop_) {
      // The calls below query the accelerator, which may never answer. `failure_monitor`, which does not query the accelerator,
      // detects that `beat` is not called any more.
      failures_->beat(deadline_);
      point const* const oldest = look();
      // The host's call may wait for operations enqueued before it: if there are any, errors name the oldest operation.
      bool const in_call = oldest == nullptr && call_order_ != 0;
      std::uint64_t const waits_for = in_call ? call_order_ : oldest == nullptr ? 0 : oldest->order_;
      awaited const about = in_call ? call_ : oldest == nullptr ? awaited{} : oldest->about_;
      auto const since = in_call ? call_begin_ : last_end_;
      auto const longest = deadline_;
      hold.unlock();
      // Other ranks read the wait in the store, to find the rank that is late.
      if (waits_for != told_) {
        if (told_ != 0) failures_->end_wait();
        if (waits_for != 0) failures_->begin_wait(about, longest);
        told_ = waits_for;
      }
      stream_fault const fault = streams_->fault();
      bool const late = waits_for != 0 && clock::now() > since + longest;
      if (!ended_ && !failures_->failed() && (fault || late))
        failures_->report(fault ? failure_of(about, fault, failures_->rank()) : timeout_of(about, longest));
      if (!ended_ && failures_->failed()) {
        ended_ = true;
        streams_->abort();
      }
      hold.lock();
      changed_.wait_for(hold, look_again, [this] { return stop_; });
    }
    if (told_ != 0) failures_->end_wait();
  }

  /// Marks finished operations as done. The caller holds the mutex. \returns the oldest unfinished operation, or null
  point const* look() {
    point const* oldest = nullptr;
    for (point* p : points_) {
      if (!p->busy_) continue;
      if (streams_->passed(p->at_)) {
        p->busy_ = false;
        p->seen_done_ = true;
        last_end_ = clock::now();
      } else if (oldest == nullptr || p->order_ < oldest->order_) {
        oldest = p;
      }
    }
    busy_ = oldest != nullptr;
    return oldest;
  }

  Streams* streams_;
  failure_monitor* failures_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<point*> points_;
  std::uint64_t asked_ = 0;
  bool busy_ = false;
  clock::time_point last_end_ = clock::now();
  milliseconds deadline_{300000};
  awaited call_{};                // the host's current call
  std::uint64_t call_order_ = 0;  // 0: the host is in no call
  clock::time_point call_begin_{};
  bool stop_ = false;
  bool ended_ = false;      // used by the thread only: streams are aborted
  std::uint64_t told_ = 0;  // used by the thread only: order of the published wait
  std::thread thread_;
};

}  // namespace chevron::detail
