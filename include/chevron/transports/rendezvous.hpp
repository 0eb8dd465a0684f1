#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/jobs/failure_reports.hpp>
#include <chevron/jobs/signs_of_life.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>

/// \file
/// Keys in the job's store, by which the ranks of one transport join, exchange texts and leave.
/// Model for SPIN: tests/model_checking/join_and_leave.pml.

namespace chevron {

/// One transport's keys in the store. Every wait has a time limit and ends when a failure is published; its error names the
/// awaited rank.
class rendezvous {
 public:
  using milliseconds = std::chrono::milliseconds;

  /// \param store of the job \param watch this rank's failure monitor \param where this rank's place in the grid
  rendezvous(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_monitor> watch, topology const& where)
      : store_(std::move(store)), watch_(std::move(watch)), where_(where) {}

  /// Waits until all ranks have called `join` for this transport. Every rank creates its transports in the same order.
  /// \param patience longest wait
  /// \throws timeout_error naming the ranks that did not join; peer_lost_error if a rank was lost or has ended before;
  /// preflight_error if another rank has another grid
  void join(milliseconds patience) {
    if (where_.world() == 1) return;
    awaited const mine{.words = "the other ranks to join"};
    auto const me = where_.global_rank;
    std::string const shape = detail::words_of(where_);
    prefix_ = "transport" + std::to_string(store_->add("transports/" + std::to_string(me), 1)) + "/";
    store_->set(key_of(me), shape);
    auto const until = failure_monitor::clock::now() + patience;
    for (int peer = 0; peer < where_.world(); ++peer) {
      for (int looks = 1; !store_->check({key_of(peer)}); ++looks) {
        watch_->throw_if_failed(mine);
        if (looks % 100 == 0 && detail::signs_of_life::has_ended(*store_, peer)) {
          failure const gone{.rank = peer, .action = "join", .reason = "rank " + std::to_string(peer) + " has ended"};
          throw_failure(watch_->report(gone), mine, me);
        }
        if (failure_monitor::clock::now() > until) fail_to_meet(peer, mine, patience);
        std::this_thread::sleep_for(milliseconds(2));
      }
      auto const theirs = store_->get_to_str(key_of(peer));
      if (theirs == shape) continue;
      throw preflight_error("this rank has " + shape + ", rank " + std::to_string(peer) + " has " + theirs +
                                ". Remedy: give every rank the same flags",
                            {.rank = me, .peer = peer, .action = "join"});
    }
  }

  /// The prefix of all keys of this transport.
  std::string const& prefix() const { return prefix_; }
  /// Counts this rank as left in the store, and waits, five seconds at most, until all ranks have left.
  void leave() {
    store_->add(prefix_ + "left", 1);
    auto const until = failure_monitor::clock::now() + std::chrono::seconds(5);
    while (store_->add(prefix_ + "left", 0) < where_.world() && !watch_->failed() && failure_monitor::clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  /// Stores a value for `wait_for` of other ranks.
  void publish(std::string const& key, std::string const& value) { store_->set(prefix_ + key, value); }

  /// Waits for the value that a rank publishes under a key.
  /// \param mine description of the wait, for errors and other ranks
  /// \param patience longest wait
  /// \param details this rank's counts and need, written to the store with the wait
  /// \returns the published value
  /// \throws timeout_error after `patience`; the failure that any rank has published
  std::string wait_for(std::string const& key, awaited const& mine, milliseconds patience,
                       detail::wait_details const& details = {}) {
    std::string const whole = prefix_ + key;
    auto const until = failure_monitor::clock::now() + patience;
    watch_->host_waits(mine, details);
    auto const ends = c10::make_scope_exit([&] { watch_->host_goes_on(); });
    while (!store_->check({whole})) {
      watch_->throw_if_failed(mine);
      if (failure_monitor::clock::now() > until) {
        throw_failure(watch_->report(detail::timeout_of(mine, patience)), mine, where_.global_rank);
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    return store_->get_to_str(whole);
  }

  /// Gathers a text from each rank.
  /// \param about the call that gathers \param details as in `wait_for`
  /// \returns the texts by global rank
  /// \throws preflight_error if ranks are in different calls; timeout_error as `wait_for`
  std::vector<std::string> all_gather(std::string const& mine, awaited const& about, milliseconds patience,
                                      detail::wait_details const& details) {
    if (where_.world() == 1) return {mine};
    std::string const round = "texts" + std::to_string(++gathered_) + "/";
    publish(round + std::to_string(where_.global_rank),
            about.words + (detail::field_separator + about.text()) + detail::field_separator + mine);
    std::vector<std::string> out;
    for (int r = 0; r < where_.world(); ++r) {
      if (r == where_.global_rank) {
        out.push_back(mine);
        continue;
      }
      std::string const told =
          wait_for(round + std::to_string(r), {.peer = r, .words = about.words, .step = about.step}, patience, details);
      auto const name = told.find(detail::field_separator), place_of_it = told.find(detail::field_separator, name + 1);
      if (told.compare(0, name, about.words) != 0) {
        auto const theirs = told.substr(name + 1, place_of_it - name - 1);
        throw preflight_error(detail::different_calls(r, theirs, where_.global_rank, about.text()),
                              {.rank = where_.global_rank, .peer = r, .step = about.step, .action = about.words});
      }
      out.push_back(told.substr(place_of_it + 1));
    }
    return out;
  }

 private:
  std::string key_of(int rank) const { return prefix_ + "here/" + std::to_string(rank); }

  [[noreturn]] void fail_to_meet(int peer, awaited const& mine, milliseconds patience) {
    std::string missing;
    std::vector<int> ranks;
    for (int r = peer; r < where_.world(); ++r) {
      if (store_->check({key_of(r)})) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      ranks.push_back(r);
    }
    failure const late{.code = static_cast<int>(exit_code::timeout),
                       .rank = peer,
                       .action = "join",
                       .reason = "rank " + missing + " did not join within " + std::to_string(patience.count()) + " ms",
                       .ranks = std::move(ranks)};
    throw_failure(watch_->report(late), mine, where_.global_rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<failure_monitor> watch_;
  topology where_;
  std::string prefix_;
  long gathered_ = 0;
};

}  // namespace chevron
