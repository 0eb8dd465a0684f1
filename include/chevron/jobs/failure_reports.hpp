#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/jobs/signs_of_life.hpp>
#include <chevron/run/core/bounded_work.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>

/// \file
/// Failure reports in the job's store: ranks publish failures, and agree that the first published failure is the cause.
/// Model for SPIN: tests/model_checking/failure_reports.pml.

namespace chevron::detail {

/// One rank's access to the reports. Only the failure monitor's thread calls its functions, except `asking_since` and
/// `life().all_have_met`.
class failure_reports {
 public:
  using clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  /// Limits of waits are numbers of naps, not times: while a machine or a whole job is stopped (a paused virtual machine,
  /// SIGSTOP to all ranks), no rank becomes late.
  static constexpr auto nap = milliseconds(10);
  static constexpr clock::time_point not_asking{clock::time_point::max() - std::chrono::hours(1)};

  /// \param own a connection to the store that no other thread uses
  failure_reports(c10::intrusive_ptr<c10d::Store> own, int rank, int world)
      : own_(std::move(own)), rank_(rank), world_(world), life_(*own_, rank, world) {}

  /// The begin of the current call to the store; `not_asking` between calls. An old begin shows that the store does not answer,
  /// which blocks the monitor's thread.
  clock::time_point asking_since() const { return asking_since_; }
  void begins_asking() { asking_since_ = clock::now(); }
  void ends_asking() { asking_since_ = not_asking; }

  /// The published failure, if there is one.
  std::optional<failure> poll() {
    if (!own_->check({"failure"})) return std::nullopt;
    return failure_of(own_->get_to_str("failure"));
  }

  /// The signs of life of ranks without connections that break.
  signs_of_life& life() { return life_; }

  /// Chooses the rank whose message stands for the job's: the first rank that calls, and a rank that failed by itself before
  /// the ranks that only stopped. Called by any thread, with a connection that may be in use by another thread.
  /// \param waits whether the call first waits up to 0.3 s for the choice of another rank
  /// \returns the chosen rank; `rank` if the store does not answer within a second
  static int speaker(c10::intrusive_ptr<c10d::Store> store, int rank, bool waits) {
    auto const chosen = std::make_shared<std::atomic<int>>(rank);
    do_within(milliseconds(1000), [store = std::move(store), rank, waits, chosen] {
      for (int naps = 0; waits && naps < 30 && !store->check({"speaker"}); ++naps) std::this_thread::sleep_for(nap);
      std::string const first = store->compareSet("speaker", std::string(), std::to_string(rank));
      *chosen = static_cast<int>(number_of(first));
      store->add("spoken", 1);
    });
    return *chosen;
  }
  /// The number of ranks that have called `speaker`.
  static int spoken(c10d::Store& store) { return static_cast<int>(store.add("spoken", 0)); }

  /// The number of ranks that have read the failure.
  int acknowledged() { return static_cast<int>(own_->add("acknowledged", 0)); }
  void acknowledge() {
    try {
      own_->add("acknowledged", 1);
    } catch (std::exception const&) {
      // The store is lost, so no rank reads the count.
    }
  }

  /// Writes this rank's wait to the store, for other ranks. In a long wait the monitor calls this repeatedly. Each call writes
  /// a new tick, so an unchanged tick means that the rank has stopped or waits no more.
  void write_waiting(wait_entry mine) {
    mine.tick = ++tick_;
    own_->set(waiting_key(rank_), to_line(mine));
  }

  /// Finds ranks that wait for each other, so that no such rank can continue, and publishes this failure. Called repeatedly
  /// while this rank waits; only the lowest of the waiting ranks searches. \returns the failure that was published first, if
  /// ranks are stuck
  std::optional<failure> look_for_stuck() {
    std::vector<std::optional<wait_entry>> now;
    for (int r = 0; r < world_; ++r) {
      now.push_back(read_waiting(r));
      if (r >= rank_ || !now.back()) continue;
      ticks_.resize(static_cast<std::size_t>(world_));
      if (std::exchange(ticks_[static_cast<std::size_t>(r)], now.back()->tick) == now.back()->tick) continue;
      looks_.forget();
      return std::nullopt;
    }
    auto const waits = looks_.look(std::move(now));
    auto const stuck = stuck_ranks(waits);
    if (stuck.empty()) return std::nullopt;
    return publish(failure_of_stuck(stuck, waits));
  }
  /// Discards the looks so far, as this rank has stopped waiting.
  void stop_looking() { looks_.forget(); }

  /// Publishes this rank's failure, or returns the failure that another rank published before. If a rank is lost, first waits
  /// 0.3 s for a better explanation (a launcher knows the signal), and half as long after a fault of this rank: other ranks,
  /// which may know of this rank's loss alone, then publish later. After a timeout, first follows waits from rank to rank, and
  /// blames the first rank that does not wait.
  /// \param waiting this rank's wait, which has lasted for `waited`
  /// \param broken_connection returns the loss of a rank whose connection to this rank is broken, if any
  template <class BrokenConnection>
  failure settle(failure mine, wait_entry const& waiting, milliseconds waited, BrokenConnection const& broken_connection) {
    if (mine.code == static_cast<int>(exit_code::peer_lost)) {
      if (auto better = poll_for(milliseconds(mine.by_itself ? 150 : 300), waiting)) return *better;
      // A failed collective does not tell which rank was lost; the broken connection does.
      if (mine.rank < 0) {
        if (auto const lost = broken_connection()) mine.rank = lost->rank, mine.reason = lost->reason;
      }
    }
    if (mine.code == static_cast<int>(exit_code::timeout)) {
      if (auto better = follow(mine, waiting, waited)) return *better;
    }
    return publish(mine);
  }

 private:
  failure publish(failure const& mine) { return failure_of(own_->compareSet("failure", std::string(), to_line(mine))); }

  /// Polls for a published failure for `time`, and meanwhile writes this rank's wait repeatedly, for other ranks' searches.
  std::optional<failure> poll_for(milliseconds time, wait_entry const& waiting) {
    for (int naps = 0; naps < time / nap; ++naps, std::this_thread::sleep_for(nap)) {
      begins_asking();  // the store has answered; a new call begins
      if (auto f = poll()) return f;
      if (naps % 4 == 0) write_waiting(waiting);
    }
    return std::nullopt;
  }

  static std::string waiting_key(int rank) { return "waiting/" + std::to_string(rank); }
  std::optional<wait_entry> read_waiting(int rank) {
    auto const key = waiting_key(rank);
    return own_->check({key}) ? wait_of(own_->get_to_str(key)) : std::nullopt;
  }

  /// Follows waits from the rank that did not answer to a rank that does not wait; after a timeout in a collective, searches
  /// all ranks for ranks that do not wait.
  /// \param mine receives the rank that was found, and a reason \returns a failure that was published meanwhile, if any
  std::optional<failure> follow(failure& mine, wait_entry const& waiting, milliseconds waited) {
    std::vector<std::optional<wait_entry>> before, now;
    for (int r = 0; r < world_; ++r) before.push_back(read_waiting(r));
    if (auto better = poll_for(milliseconds(400), waiting)) return better;
    for (int r = 0; r < world_; ++r) now.push_back(read_waiting(r));
    auto const waits = [&](int r) {
      auto const i = static_cast<std::size_t>(r);
      return r == rank_ || (now[i] && (!before[i] || now[i]->tick != before[i]->tick));
    };

    std::string chain;
    int at = mine.rank;
    for (int hops = 0; hops < world_ && at >= 0 && at != rank_ && waits(at); ++hops) {
      wait_entry const& one = *now[static_cast<std::size_t>(at)];
      chain += (chain.empty() ? "rank " : ", rank ") + std::to_string(at) + " waits for " + one.words +
               (one.peer < 0 ? "" : (one.is_send() ? " to rank " : " from rank ") + std::to_string(one.peer));
      mine.ranks.insert(mine.ranks.end(), {at, one.peer});
      at = one.peer;
    }
    if (at >= 0 && !waits(at)) {
      if (at != mine.rank) mine.reason = no_answer(at, waited) + " (" + chain + ")";
      mine.rank = at;
      return std::nullopt;
    }
    std::string others;
    int silent = -1;
    for (int r = 0; r < world_; ++r) {
      if (waits(r)) continue;
      mine.ranks.push_back(r);
      if (silent >= 0) others += (others.empty() ? "" : ", ") + std::to_string(r);
      if (silent < 0) silent = r;
    }
    if (silent >= 0) {
      mine.rank = silent;
      mine.reason = no_answer(silent, waited) + (others.empty() ? "" : ", nor did rank " + others);
    } else {
      mine.reason += chain.empty() ? "; all ranks wait" : "; all ranks wait: " + chain;
    }
    return std::nullopt;
  }

  c10::intrusive_ptr<c10d::Store> own_;
  int rank_, world_;
  signs_of_life life_;
  long tick_ = 0;
  std::vector<long> ticks_;  // by rank, the tick at the last search
  wait_looks looks_;
  std::atomic<clock::time_point> asking_since_{not_asking};
};

/// The failure of a job whose store does not answer any more.
/// \param store_host global rank; -1: the launcher
/// \param reported   this rank's own failure, if any; returned unless another rank hosts the store
/// \param why        the connection's error
inline failure lost_store(int store_host, int rank, std::optional<failure> const& reported, std::string const& why) {
  if (store_host >= 0 && store_host != rank) {
    return {.rank = store_host,
            .reason = "rank " + std::to_string(store_host) + ", which hosts the store, was lost (" + why + ")"};
  }
  if (reported) return *reported;
  return {.reason = "the launcher, which hosts the store, was lost (" + why + ")"};
}

}  // namespace chevron::detail
