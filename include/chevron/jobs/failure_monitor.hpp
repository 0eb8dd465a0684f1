#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chevron/jobs/connection_monitor.hpp>
#include <chevron/jobs/failure_reports.hpp>
#include <chevron/run/core/end_process.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/flight_log.hpp>
#include <chevron/run/core/wait_table.hpp>

/// \file
/// The failure monitor: when a rank fails, every rank learns of the failure at once and reports the same cause.
///
/// One thread per rank, with its own connection to the job's store, ends the rank's current wait when a failure is published. A
/// rank that finds a failure (a broken connection, a deadline) passes the failure to the monitor for publication; the first
/// published failure counts (failure_reports.hpp). The monitor also detects ranks that wait for each other (wait_table.hpp)
/// and lost ranks, where no connection breaks (`signs_of_life`).
///
/// The way of a lost rank: `connection_monitor::broken` finds it, `failure_monitor::run` publishes it (`failure_reports`) and
/// ends the wait, `throw_failure` (run/core/failure.hpp) throws on the waiting rank, and `run_main` makes the failure's code the
/// process's exit code.

namespace chevron {

/// One rank's monitor, shared by the rank's transports. Any thread may call the functions.
class failure_monitor {
 public:
  using clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  /// The reason why the monitor ended a wait; `none`: the monitor did not end the wait.
  enum class interruption { none, failure, deadline };

  /// \param store       used by the ranks of this job only (put a prefix on it)
  /// \param rank        global rank \param world number of ranks of the job
  /// \param store_host  global rank whose process hosts the store; -1 if the store outlives the ranks
  failure_monitor(c10::intrusive_ptr<c10d::Store> store, int rank, int world, int store_host = -1)
      : store_(std::move(store)), board_(store_->clone(), rank, world), rank_(rank), world_(world), store_host_(store_host) {
    thread_ = std::thread([this] { run(); });
  }
  ~failure_monitor() { stop(); }
  failure_monitor(failure_monitor const&) = delete;
  failure_monitor& operator=(failure_monitor const&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }

  /// Called as a wait begins. \param longest time until the deadline \param work transfer that the monitor aborts to end the
  /// wait (only possible for Gloo's sends and receives) or null \param details this rank's counts and need, for other ranks
  void begin_wait(awaited const& mine, milliseconds longest, c10d::Work* work = nullptr,
                  detail::wait_details const& details = {}) {
    std::lock_guard lock(mutex_);
    waiting_ = true;
    ++waits_;
    mine_ = mine;
    details_ = details;
    since_ = clock::now();
    deadline_ = since_ + longest;
    work_ = work;
    expired_ = false;
    // A failure is known already, and the thread aborts only the transfer that waits when a failure becomes known.
    if (agreed_ && work_ != nullptr) work_->abort();
  }
  /// Called as a wait ends. \param late whether this rank found the deadline passed \returns why the monitor ended the wait
  interruption end_wait(bool late = false) {
    std::lock_guard lock(mutex_);
    waiting_ = false;
    work_ = nullptr;
    details_ = {};
    expired_ = expired_ || late;
    return agreed_ ? interruption::failure : expired_ ? interruption::deadline : interruption::none;
  }

  /// Called as the host begins to wait, while its streams may wait too (`begin_wait`): other ranks then read the host's wait.
  /// The data behind the pointers in `details` must not change until `host_goes_on`.
  void host_waits(awaited const& mine, detail::wait_details const& details) {
    std::lock_guard lock(mutex_);
    host_ = host_wait{mine, details, clock::now()};
    ++waits_;
  }
  void host_goes_on() {
    std::lock_guard lock(mutex_);
    host_.reset();
  }

  /// Within `begin_wait` and `end_wait`: waits for a flag that `wake` sets; false if a failure or the deadline came first.
  bool wait_for(std::atomic<bool> const& done) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline_, [&] { return done.load() || agreed_.has_value(); });
    if (!done.load() && !agreed_) expired_ = true;
    return done.load();
  }
  void wake(std::atomic<bool>& done) {
    {
      std::lock_guard lock(mutex_);
      done = true;
    }
    changed_.notify_all();
  }

  /// Whether a failure is known on this rank. Costs one atomic load.
  bool failed() const { return known_.load(std::memory_order_acquire); }
  /// Throws the published failure, if there is one. \param mine the call of this rank, for the error
  void throw_if_failed(awaited const& mine) {
    if (failed()) throw_failure(consumed(), mine, rank_);
  }

  /// Publishes this rank's failure and returns the job's first failure, within two seconds even if the store does not answer.
  failure report(failure const& mine) {
    std::unique_lock lock(mutex_);
    if (!agreed_ && !stop_) {
      report_ = mine;
      changed_.notify_all();
      // A store that has not answered for a second will probably not answer this call: waits for three naps only.
      auto asking = board_.asking_since();
      int in_store = asking + milliseconds(1000) < clock::now() ? 7 : 0;
      for (int naps = 0; naps < 20 && in_store < 10 && !agreed_; ++naps) {
        changed_.wait_for(lock, nap, [&] { return agreed_.has_value(); });
        auto const before = std::exchange(asking, board_.asking_since());
        in_store = asking != board::not_asking && asking == before ? in_store + 1 : 0;
      }
    }
    if (!agreed_) {
      failure alone = mine;
      if (board_.asking_since() != board::not_asking && store_host_ >= 0 && store_host_ != rank_ &&
          mine.code == static_cast<int>(exit_code::timeout)) {
        alone.rank = store_host_;
        alone.reason = detail::no_answer(store_host_, std::chrono::duration_cast<milliseconds>(deadline_ - since_)) +
                       ", nor does the store it hosts";
      }
      agree_on(alone);
    }
    note_consumed();
    return *agreed_;
  }

  /// The line that this rank prints before its process ends: the whole message on one rank of the job, elsewhere a short line
  /// that names that rank. A rank with another fault of its own prints its whole message, too.
  /// \param whole the rank's message \param mine the same message as a failure
  /// \param first the job's first failure, as `report` returned it
  std::string line_at_the_end(std::string const& whole, failure const& mine, failure const& first) const {
    bool const by_another = first.rank >= 0 && first.rank != rank_;
    int const speaker = board::speaker(store_, rank_, /*waits=*/by_another && !first.given_up());
    bool const told = mine.reason.find(first.reason) != std::string::npos || detail::same_sentence(mine, first);
    if (speaker != rank_) return told ? detail::short_line(rank_, mine, first, speaker) : whole;
    return told ? whole : whole + "; the job's first failure: " + detail::placed_reason(first);
  }

  /// Called by a transport that has connected all ranks. \param breaks_connections whether a lost rank breaks the transport's
  /// connections; otherwise the monitor keeps checking signs of life, until `all_have_left`
  void all_have_met(bool breaks_connections) { board_.life().all_have_met(breaks_connections); }
  /// Called by a transport without connections that break, once all ranks have left it.
  void all_have_left() { board_.life().all_have_left(); }

  /// Adds a connection that the monitor checks: detects the loss of `peer` without a wait for `peer` and without a launcher.
  /// \param pending a receive that stays pending until the connection breaks
  void look_at(int peer, c10::intrusive_ptr<c10d::Work> pending) { connections_.add(peer, std::move(pending)); }
  /// Removes all connections from the monitor; called before the connections are closed.
  void look_away() { connections_.clear(); }

  /// Makes the monitor end this process, with the failure's exit code, if the rank has not noticed a published failure for
  /// `patience` (the rank computes, or hangs outside of any wait), or has noticed the failure but not ended within 10 seconds:
  /// destroying a broken accelerator's objects may hang. For programs that have nothing to save.
  void end_process_after(milliseconds patience) {
    std::lock_guard lock(mutex_);
    patience_ = patience;
  }

  /// Reports that this rank's accelerator answers; the thread that monitors the streams calls it repeatedly. The monitor
  /// publishes a timeout of the accelerator if no further call follows within `longest` plus 10 seconds.
  void beat(milliseconds longest) {
    std::lock_guard lock(mutex_);
    next_beat_ = clock::now() + longest + last_resort;
  }
  void expect_no_beat() {
    std::lock_guard lock(mutex_);
    next_beat_.reset();
  }

  /// Stops the monitor's thread at the normal end, after the last message of all ranks. The rank that hosts the store then
  /// waits, five seconds at most, until all ranks have called `finish`.
  void finish() {
    if (failed()) linger();
    if (!stop()) return;
    if (failed()) return;
    try {
      store_->add("ended", 1);
      auto const until = clock::now() + milliseconds(5000);
      while (rank_ == store_host_ && store_->add("ended", 0) < world_ && clock::now() < until) {
        std::this_thread::sleep_for(milliseconds(2));
      }
    } catch (std::exception const&) {
      // The store is lost: its host, which ends last, has ended.
    }
  }

  /// Called before the rank that hosts the store ends: waits up to 0.8 s until the other ranks have read the failure, and know
  /// which rank prints it.
  void linger() {
    if (rank_ != store_host_) return;
    int naps = 0;
    for (; naps < 80 && acknowledged_.load() < world_ - 1; ++naps) std::this_thread::sleep_for(board::nap);
    try {
      for (; naps < 80 && board::spoken(*store_) < world_; ++naps) std::this_thread::sleep_for(board::nap);
    } catch (std::exception const&) {
      // The store, which this process hosts, does not answer: no rank is told anything.
    }
  }

 private:
  using board = detail::failure_reports;
  struct host_wait {
    awaited mine;
    detail::wait_details details;
    clock::time_point since;
  };

  static constexpr auto look_every = milliseconds(500);
  static constexpr auto last_resort = milliseconds(10000);
  static constexpr auto nap = milliseconds(100);  // limits are numbers of naps, as in failure_reports

  bool stop() {
    {
      std::lock_guard lock(mutex_);
      if (stop_) return false;
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    return true;
  }

  failure consumed() {
    std::lock_guard lock(mutex_);
    note_consumed();
    return *agreed_;
  }

  // With mutex_ held.
  void note_consumed() {
    if (!consumed_) consumed_at_ = clock::now();
    consumed_ = true;
  }

  // With mutex_ held.
  void agree_on(failure const& f) {
    if (agreed_) return;
    agreed_ = f;
    agreed_at_ = clock::now();
    known_.store(true, std::memory_order_release);
    if (waiting_ && work_ != nullptr) work_->abort();
    changed_.notify_all();
  }

  /// Ends this process with the reason and exit code of the failure that ranks agreed on.
  [[noreturn]] void end(char const* why) const {
    failure mine = *agreed_;
    mine.step = -1, mine.action.clear();
    mine.reason = "rank " + std::to_string(rank_) + ": " + mine.reason + why;
    detail::end_process(line_at_the_end(detail::placed_reason(mine, rank_), mine, *agreed_), mine.code);
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (waiting_ && !agreed_ && !expired_ && clock::now() >= deadline_) {
        expired_ = true;
        if (work_ != nullptr) work_->abort();
      }
      if (agreed_ && !consumed_ && patience_.count() > 0 && clock::now() > agreed_at_ + patience_) {
        end("; this rank was busy and is ended");
      }
      if (consumed_ && patience_.count() > 0 && clock::now() > consumed_at_ + last_resort) {
        end("; this rank did not end by itself");
      }
      if (next_beat_ && !agreed_ && !report_ && clock::now() > *next_beat_) {
        report_ = failure{.code = static_cast<int>(exit_code::timeout),
                          .rank = rank_,
                          .reason = "rank " + std::to_string(rank_) + "'s accelerator does not answer any more",
                          .by_itself = true};
        next_beat_.reset();
      }
      auto const allowed = std::chrono::duration_cast<milliseconds>(deadline_ - since_);
      bool const long_wait = (waiting_ && clock::now() - since_ > std::clamp(allowed / 4, milliseconds(1), milliseconds(1000))) ||
                             (host_ && clock::now() - host_->since > milliseconds(1000));
      bool const looks = long_wait && clock::now() >= next_look_;
      if (looks) next_look_ = clock::now() + look_every;
      detail::wait_entry mine;
      if (long_wait || report_) mine = entry();
      // The rank computes or hangs, and may end before writing its own flight log.
      bool const busy =
          agreed_ && !consumed_ && clock::now() > agreed_at_ + poll_every_ && !std::exchange(wrote_flight_log_, true);
      auto const reported = std::exchange(report_, std::nullopt);
      lock.unlock();
      if (busy) detail::write_flight_logs(*agreed_, -1);
      std::optional<failure> learned;
      try {
        if (!failed()) {
          auto const broken = [this] { return connections_.broken(); };
          board_.begins_asking();
          learned = board_.poll();
          if (!learned && (long_wait || reported)) board_.write_waiting(mine);
          if (!learned && reported) learned = board_.settle(*reported, mine, allowed, broken);
          if (!long_wait) board_.stop_looking();
          if (!learned && looks) learned = board_.look_for_stuck();
          if (!learned) {
            auto lost = broken();
            if (!lost) lost = board_.life().look();
            if (lost) learned = board_.settle(*lost, mine, allowed, broken);
          }
        } else if (rank_ == store_host_) {
          acknowledged_ = board_.acknowledged();
        }
      } catch (std::exception const& e) {
        if (!failed()) learned = detail::lost_store(store_host_, rank_, reported, detail::message_of(e));
      }
      if (learned && rank_ != store_host_) board_.acknowledge();
      board_.ends_asking();
      lock.lock();
      if (learned) agree_on(*learned);
      auto next = clock::now() + (agreed_ ? milliseconds(20) : poll_every_);
      if (waiting_ && !expired_ && !agreed_) next = std::min(next, std::max(deadline_, clock::now() + milliseconds(1)));
      changed_.wait_until(lock, next, [&] { return stop_ || report_.has_value(); });
    }
    lock.unlock();
    if (!failed()) board_.life().ends();
  }

  /// This rank's wait, for other ranks. Called with `mutex_` held: the wait cannot end, so its details' data do not change.
  detail::wait_entry entry() const {
    return host_ ? detail::entry_of(waits_, host_->mine, host_->details) : detail::entry_of(waits_, mine_, details_);
  }

  c10::intrusive_ptr<c10d::Store> store_;  // keeps a hosted store alive
  board board_;                            // used by the monitor's thread, over a separate connection
  int rank_;
  int world_;
  int store_host_;
  /// Between looks at the store: 100 ms, and longer where more than 512 ranks ask it, up to 0.8 s.
  milliseconds poll_every_{std::clamp(world_ / 5, 100, 800)};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool waiting_ = false;
  bool expired_ = false;
  bool consumed_ = false, wrote_flight_log_ = false;
  awaited mine_;
  detail::wait_details details_;
  std::optional<host_wait> host_;
  std::uint64_t waits_ = 0;  // number of waits begun
  clock::time_point next_look_ = clock::now();
  clock::time_point since_, deadline_, agreed_at_, consumed_at_;
  c10d::Work* work_ = nullptr;
  std::optional<failure> report_, agreed_;
  milliseconds patience_{0};
  std::optional<clock::time_point> next_beat_;
  std::atomic<bool> known_{false};
  detail::connection_monitor connections_;
  std::atomic<int> acknowledged_{0};
  std::thread thread_;
};

}  // namespace chevron
