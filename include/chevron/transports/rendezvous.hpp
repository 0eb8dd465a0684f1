#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
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
#include <chevron/run/core/text_parts.hpp>

/// \file
/// Keys in the job's store, by which the ranks of one transport join, exchange texts and leave.
/// Model for SPIN: tests/model_checking/join_and_leave.pml.

namespace chevron {

namespace detail {

/// The pauses between questions to the store in one wait: 1 ms, then half as long again each time, up to 100 ms. A late rank so
/// costs the store ten questions a second of each rank that waits, and a wait becomes longer by a third of its time at most.
class store_pauses {
 public:
  using clock = std::chrono::steady_clock;

  /// \param until end of the wait
  explicit store_pauses(clock::time_point until) : until_(until) {}
  bool has_passed() const { return clock::now() > until_; }  ///< whether the wait's end has passed
  void pause() {
    std::this_thread::sleep_until(std::min(clock::now() + next_, until_ + std::chrono::milliseconds(1)));
    next_ = std::min(next_ + std::max(next_ / 2, std::chrono::milliseconds(1)), std::chrono::milliseconds(100));
  }

 private:
  clock::time_point until_;
  std::chrono::milliseconds next_{1};
};

/// Texts of all ranks in one text, each distinct text once: copies of a stage have equal texts. Read by `texts_of`.
inline std::string to_one_text(std::vector<std::string> const& texts) {
  std::unordered_map<std::string_view, std::size_t> known;
  std::string places, distinct, out;
  for (std::string const& one : texts) {
    auto const [at, is_new] = known.try_emplace(one, known.size());
    add_number(places, at->second);
    if (is_new) add_text(distinct, one);
  }
  add_number(out, known.size());
  return out + distinct + places;
}
/// The texts by rank.
inline std::vector<std::string> texts_of(std::string const& one_text) {
  text_reader from(one_text);
  std::vector<std::string> distinct, out;
  for (std::size_t left = from.number(); left > 0; --left) distinct.push_back(from.text());
  while (!from.at_end()) out.push_back(distinct.at(from.number()));
  return out;
}

}  // namespace detail

/// One transport's keys in the store. Every wait has a time limit and ends when a failure is published; its error names the
/// awaited rank. What all ranks exchange, rank 0 collects and publishes as one text, so that the number of requests to the store
/// grows as the number of ranks, not as its square.
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
    std::string const shape = detail::words_of(where_), here = "here/";
    prefix_ = "transport" + std::to_string(store_->add("transports/" + std::to_string(me), 1)) + "/";
    publish(here + std::to_string(me), shape);
    auto const compare = [&](int peer, std::string const& theirs) {
      if (theirs == shape) return;
      throw preflight_error("this rank has " + shape + ", rank " + std::to_string(peer) + " has " + theirs +
                                ". Remedy: give every rank the same flags",
                            {.rank = me, .peer = peer, .action = "join"});
    };
    auto const until = detail::store_pauses::clock::now() + patience;
    auto const late = [&](std::vector<int> const& missing) { fail_to_meet(missing, mine, patience); };
    int looks = 0;
    auto const look = [&] {
      if (++looks % 8 != 0) return;  // first after 60 ms, later every 0.8 s
      auto const missing = me == 0 ? missing_of(here, 1, where_.world()) : missing_of(here, 0, 1);
      if (missing.empty() || !detail::signs_of_life::has_ended(*store_, missing[0])) return;
      failure const gone{.rank = missing[0], .action = "join", .reason = "rank " + std::to_string(missing[0]) + " has ended"};
      throw_failure(watch_->report(gone), mine, me);
    };
    // First one other rank, since a rank of a larger grid would wait for ranks that do not exist.
    int const first = me == 0 ? 1 : 0;
    if (!come(keys_of(here, first, first + 1), mine, until, look)) {
      if (auto const missing = missing_of(here, 0, where_.world()); !missing.empty()) late(missing);
    }
    compare(first, store_->get_to_str(prefix_ + here + std::to_string(first)));
    auto const shapes = collect(here, mine, until, late, look);
    for (int peer = 0; peer < where_.world(); ++peer) compare(peer, shapes[static_cast<std::size_t>(peer)]);
  }

  /// The prefix of all keys of this transport.
  std::string const& prefix() const { return prefix_; }
  /// Counts this rank as left in the store, and waits, five seconds at most, until all ranks have left.
  void leave() {
    store_->add(prefix_ + "left", 1);
    detail::store_pauses pauses(detail::store_pauses::clock::now() + std::chrono::seconds(5));
    while (store_->add(prefix_ + "left", 0) < where_.world() && !watch_->failed() && !pauses.has_passed()) pauses.pause();
  }

  /// Stores a value for `wait_for` of other ranks.
  void publish(std::string const& key, std::string const& value) { store_->set(prefix_ + key, value); }

  /// Waits for the value that a rank publishes under a key.
  /// \param mine description of the wait, for errors and other ranks
  /// \param patience longest wait
  /// \returns the published value
  /// \throws timeout_error after `patience`; the failure that any rank has published
  std::string wait_for(std::string const& key, awaited const& mine, milliseconds patience) {
    watch_->host_waits(mine, {});
    auto const ends = c10::make_scope_exit([&] { watch_->host_goes_on(); });
    if (!come({prefix_ + key}, mine, detail::store_pauses::clock::now() + patience)) fail(mine, patience);
    return store_->get_to_str(prefix_ + key);
  }

  /// Gathers a text from each rank.
  /// \param about the call that gathers \param patience longest wait
  /// \param details this rank's counts and need, written to the store with the wait
  /// \returns the texts by global rank
  /// \throws preflight_error if ranks are in different calls; timeout_error and the failure of any rank as `wait_for`
  std::vector<std::string> all_gather(std::string const& mine, awaited const& about, milliseconds patience,
                                      detail::wait_details const& details) {
    if (where_.world() == 1) return {mine};
    std::string const round = "texts" + std::to_string(++gathered_) + "/";
    publish(round + std::to_string(where_.global_rank),
            about.words + (detail::field_separator + about.text()) + detail::field_separator + mine);
    watch_->host_waits(about, details);
    auto const ends = c10::make_scope_exit([&] { watch_->host_goes_on(); });
    auto const late = [&](std::vector<int> const& missing) {
      fail({.peer = missing[0], .words = about.words, .step = about.step}, patience);
    };
    auto out = collect(round, about, detail::store_pauses::clock::now() + patience, late);
    for (int r = 0; r < where_.world(); ++r) {
      std::string& told = out[static_cast<std::size_t>(r)];
      auto const name = told.find(detail::field_separator), place_of_it = told.find(detail::field_separator, name + 1);
      if (told.compare(0, name, about.words) != 0) {
        auto const theirs = told.substr(name + 1, place_of_it - name - 1);
        throw preflight_error(detail::different_calls(r, theirs, where_.global_rank, about.text()),
                              {.rank = where_.global_rank, .peer = r, .step = about.step, .action = about.words});
      }
      told.erase(0, place_of_it + 1);
    }
    return out;
  }

 private:
  using time_point = detail::store_pauses::clock::time_point;
  using looking = std::function<void()>;

  /// Waits until keys are in the store. \param look called between looks \returns false if `until` has passed
  bool come(std::vector<std::string> const& keys, awaited const& mine, time_point until, looking const& look = nullptr) {
    for (detail::store_pauses pauses(until); !store_->check(keys); pauses.pause()) {
      watch_->throw_if_failed(mine);
      if (look) look();
      if (pauses.has_passed()) return false;
    }
    return true;
  }

  /// The texts that all ranks have published under `round`, by rank.
  /// \param late throws, given ranks whose text is missing at `until`
  std::vector<std::string> collect(std::string const& round, awaited const& mine, time_point until,
                                   std::function<void(std::vector<int> const&)> const& late, looking const& look = nullptr) {
    int const world = where_.world();
    std::string const all = prefix_ + round + "all";
    bool const collects = where_.global_rank == 0;
    if (!come(collects ? keys_of(round, 0, world) : std::vector{all}, mine, until, look)) {
      // If all texts have come by now, rank 0 did not publish them.
      auto const missing = missing_of(round, 0, world);
      late(missing.empty() ? std::vector{0} : missing);
    }
    if (!collects) return detail::texts_of(store_->get_to_str(all));
    std::vector<std::string> out;
    for (auto const& text : store_->multiGet(keys_of(round, 0, world))) out.emplace_back(text.begin(), text.end());
    store_->set(all, detail::to_one_text(out));
    return out;
  }

  std::vector<std::string> keys_of(std::string const& round, int first, int last) const {
    std::vector<std::string> out;
    for (int r = first; r < last; ++r) out.push_back(prefix_ + round + std::to_string(r));
    return out;
  }
  /// The ranks from `first` to `last - 1` that have published nothing under `round`, found by halving: a few questions for each.
  std::vector<int> missing_of(std::string const& round, int first, int last) {
    if (store_->check(keys_of(round, first, last))) return {};
    if (last - first == 1) return {first};
    auto out = missing_of(round, first, (first + last) / 2), more = missing_of(round, (first + last) / 2, last);
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  [[noreturn]] void fail(awaited const& mine, milliseconds patience) {
    throw_failure(watch_->report(detail::timeout_of(mine, patience)), mine, where_.global_rank);
  }
  [[noreturn]] void fail_to_meet(std::vector<int> const& missing, awaited const& mine, milliseconds patience) {
    std::string words;
    for (int const r : missing) words += (words.empty() ? "" : ", ") + std::to_string(r);
    failure const late{.code = static_cast<int>(exit_code::timeout),
                       .rank = missing[0],
                       .action = "join",
                       .reason = "rank " + words + " did not join within " + std::to_string(patience.count()) + " ms",
                       .ranks = missing};
    throw_failure(watch_->report(late), mine, where_.global_rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<failure_monitor> watch_;
  topology where_;
  std::string prefix_;
  long gathered_ = 0;
};

}  // namespace chevron
