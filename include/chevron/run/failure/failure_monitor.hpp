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

#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/connection_monitor.hpp>
#include <chevron/run/failure/end_process.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/failure_reports.hpp>
#include <chevron/run/failure/flight_log.hpp>
#include <chevron/run/failure/wait_table.hpp>

/// \file
/// The failure monitor: when a rank fails, every rank learns of the failure at once and reports the same cause.
///
/// One thread a rank, with a connection of its own to the job's store, ends the rank's current wait when a failure was published.
/// A rank that finds a failure (a broken connection, a deadline) passes it to the monitor, which publishes it; the first report
/// counts (failure_reports.hpp). The monitor also finds ranks that wait for each other (wait_table.hpp), and until all ranks have
/// connected, lost ones (`signs_of_life`).

namespace chevron {

/// One rank's monitor, shared by its transports. Functions are called by any thread.
class failure_monitor {
 public:
  using clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  /// The reason why the monitor ended a wait; `none`: the transfer ended it.
  enum class interruption { none, failure, deadline };

  /// \param store       of the ranks of this job alone (put a prefix on it)
  /// \param rank        global \param world ranks of the job
  /// \param store_host  global rank whose end ends the store; -1 if the store outlives the ranks
  failure_monitor(c10::intrusive_ptr<c10d::Store> store, int rank, int world, int store_host = -1)
      : store_(std::move(store)), board_(store_->clone(), rank, world), rank_(rank), world_(world), store_host_(store_host) {
    thread_ = std::thread([this] { run(); });
  }
  ~failure_monitor() { stop(); }
  failure_monitor(failure_monitor const&) = delete;
  failure_monitor& operator=(failure_monitor const&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }

  /// Begins a wait. \param longest until the deadline \param work aborted when the monitor ends the wait, if not null (only
  /// Gloo's sends and receives can be) \param details this rank's progress and needs, shown to other ranks
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
    // The failure was published before this wait: the thread's next poll would abort it up to 100 ms later.
    if (verdict_ && work_ != nullptr) work_->abort();
  }
  /// Ends a wait. \param late whether the rank saw the deadline pass itself \returns why the monitor ended the wait
  interruption end_wait(bool late = false) {
    std::lock_guard lock(mutex_);
    waiting_ = false;
    work_ = nullptr;
    details_ = {};
    expired_ = expired_ || late;
    return verdict_ ? interruption::failure : expired_ ? interruption::deadline : interruption::none;
  }

  /// Begins a wait of the host, while its streams may be in a wait of their own (`begin_wait`): other ranks then see the host's
  /// wait. `details` must point to data that do not change until `host_goes_on`.
  void host_waits(awaited const& mine, detail::wait_details const& details) {
    std::lock_guard lock(mutex_);
    host_ = host_wait{mine, details, clock::now()};
    ++waits_;
  }
  void host_goes_on() {
    std::lock_guard lock(mutex_);
    host_.reset();
  }

  /// Waits for a flag that `wake` sets, within `begin_wait` and `end_wait`; false if a failure or the deadline came first.
  bool wait_for(std::atomic<bool> const& done) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline_, [&] { return done.load() || verdict_.has_value(); });
    if (!done.load() && !verdict_) expired_ = true;
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

  /// Publishes this rank's failure and returns the first report of all ranks, within two seconds in any state of the store.
  failure report(failure const& mine) {
    std::unique_lock lock(mutex_);
    if (!verdict_ && !stop_) {
      report_ = mine;
      changed_.notify_all();
      // A store that has not answered for a second will hardly answer this call.
      auto asking = board_.asking_since();
      int in_store = asking + milliseconds(1000) < clock::now() ? 7 : 0;
      for (int naps = 0; naps < 20 && in_store < 10 && !verdict_; ++naps) {
        changed_.wait_for(lock, nap, [&] { return verdict_.has_value(); });
        auto const before = std::exchange(asking, board_.asking_since());
        in_store = asking != board::not_asking && asking == before ? in_store + 1 : 0;
      }
    }
    if (!verdict_) {
      failure alone = mine;
      if (board_.asking_since() != board::not_asking && store_host_ >= 0 && store_host_ != rank_ &&
          mine.code == static_cast<int>(exit_code::timeout)) {
        alone.rank = store_host_;
        alone.reason = detail::no_answer(store_host_, std::chrono::duration_cast<milliseconds>(deadline_ - since_)) +
                       ", nor does the store it hosts";
      }
      set_verdict(alone);
    }
    note_consumed();
    return *verdict_;
  }

  /// To be called by the first transport that has connected all ranks: from here on broken connections show lost ranks.
  void all_have_met() { board_.life().all_have_met(); }

  /// Adds a connection that the monitor checks, so that a loss is found without a wait for that rank and without a launcher.
  /// \param pending a receive that stays pending until the connection breaks
  void look_at(int peer, c10::intrusive_ptr<c10d::Work> pending) { connections_.add(peer, std::move(pending)); }
  /// Forgets all connections. To be called before they are closed.
  void look_away() { connections_.clear(); }

  /// Ends this process, with the failure's exit code, if the rank does not notice a published failure for `patience` (it
  /// computes, or hangs outside of any wait), or has noticed it and does not end within 10 seconds: destroying a broken
  /// accelerator's objects may hang. For programs that have nothing to save.
  void end_process_after(milliseconds patience) {
    std::lock_guard lock(mutex_);
    patience_ = patience;
  }

  /// Shows that this rank's accelerator answers; called repeatedly by the thread that monitors its streams. The accelerator has
  /// failed if no call comes for `longest` and 10 seconds more.
  void beat(milliseconds longest) {
    std::lock_guard lock(mutex_);
    next_beat_ = clock::now() + longest + last_resort;
  }
  void expect_no_beat() {
    std::lock_guard lock(mutex_);
    next_beat_.reset();
  }

  /// The normal end, once all ranks are past their last message: stops the thread; the host of the store waits until all ranks
  /// have called it, five seconds at most.
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
      // The store is lost: its host has ended, and is the last to do so.
    }
  }

  /// Gives the other ranks up to 0.8 s to read the failure, before the store's host ends.
  void linger() {
    if (rank_ != store_host_) return;
    for (int naps = 0; naps < 80 && acknowledged_.load() < world_ - 1; ++naps) std::this_thread::sleep_for(board::nap);
  }

 private:
  using board = detail::failure_reports;
  struct host_wait {
    awaited mine;
    detail::wait_details details;
    clock::time_point since;
  };

  static constexpr auto poll_every = milliseconds(100);
  static constexpr auto look_every = milliseconds(500);
  static constexpr auto last_resort = milliseconds(10000);
  static constexpr auto nap = milliseconds(100);  // counted in naps, as in failure_reports

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
    return *verdict_;
  }

  // With mutex_ held.
  void note_consumed() {
    if (!consumed_) consumed_at_ = clock::now();
    consumed_ = true;
  }

  // With mutex_ held.
  void set_verdict(failure const& f) {
    if (verdict_) return;
    verdict_ = f;
    verdict_at_ = clock::now();
    known_.store(true, std::memory_order_release);
    if (waiting_ && work_ != nullptr) work_->abort();
    changed_.notify_all();
  }

  /// Ends this process with the verdict.
  [[noreturn]] void end(char const* why) const {
    std::string const message = "rank " + std::to_string(rank_) + ": " + verdict_->reason + why;
    detail::end_process(detail::job_grid::with_places(message, rank_), verdict_->code);
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (waiting_ && !verdict_ && !expired_ && clock::now() >= deadline_) {
        expired_ = true;
        if (work_ != nullptr) work_->abort();
      }
      if (verdict_ && !consumed_ && patience_.count() > 0 && clock::now() > verdict_at_ + patience_) {
        end("; this rank was busy and is ended");
      }
      if (consumed_ && patience_.count() > 0 && clock::now() > consumed_at_ + last_resort) {
        end("; this rank did not end by itself");
      }
      if (next_beat_ && !verdict_ && !report_ && clock::now() > *next_beat_) {
        report_ = failure{.code = static_cast<int>(exit_code::timeout),
                          .rank = rank_,
                          .reason = "rank " + std::to_string(rank_) + "'s accelerator does not answer any more"};
        next_beat_.reset();
      }
      auto const allowed = std::chrono::duration_cast<milliseconds>(deadline_ - since_);
      bool const long_wait = (waiting_ && clock::now() - since_ > std::clamp(allowed / 4, milliseconds(1), milliseconds(1000))) ||
                             (host_ && clock::now() - host_->since > milliseconds(1000));
      bool const looks = long_wait && clock::now() >= next_look_;
      if (looks) next_look_ = clock::now() + look_every;
      detail::wait_entry mine;
      if (long_wait || report_) mine = entry();
      // The rank computes or hangs, and may not live to write its own log.
      bool const busy =
          verdict_ && !consumed_ && clock::now() > verdict_at_ + poll_every && !std::exchange(wrote_flight_log_, true);
      auto const reported = std::exchange(report_, std::nullopt);
      lock.unlock();
      if (busy) detail::write_flight_logs(*verdict_, -1);
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
      if (learned) set_verdict(*learned);
      auto next = clock::now() + (verdict_ ? milliseconds(20) : poll_every);
      if (waiting_ && !expired_ && !verdict_) next = std::min(next, std::max(deadline_, clock::now() + milliseconds(1)));
      changed_.wait_until(lock, next, [&] { return stop_ || report_.has_value(); });
    }
    lock.unlock();
    if (!failed()) board_.life().ends();
  }

  /// This rank's wait, for the other ranks. With the mutex held: the wait cannot end, so the data of its details do not change.
  detail::wait_entry entry() const {
    return host_ ? detail::entry_of(waits_, host_->mine, host_->details) : detail::entry_of(waits_, mine_, details_);
  }

  c10::intrusive_ptr<c10d::Store> store_;  // keeps a hosted store alive
  board board_;                            // used by the monitor's thread, over a connection of its own
  int rank_;
  int world_;
  int store_host_;

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
  clock::time_point since_, deadline_, verdict_at_, consumed_at_;
  c10d::Work* work_ = nullptr;
  std::optional<failure> report_, verdict_;
  milliseconds patience_{0};
  std::optional<clock::time_point> next_beat_;
  std::atomic<bool> known_{false};
  detail::connection_monitor connections_;
  std::atomic<int> acknowledged_{0};
  std::thread thread_;
};

}  // namespace chevron
