#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/error.hpp>
#include <chevron/run/failure.hpp>
#include <chevron/run/transport.hpp>
#include <chevron/run/watch.hpp>

/// \file
/// What the ranks of one transport tell each other through the job's store.

namespace chevron {

/// The keys of one transport. Every wait is bounded, ends when a failure is published, and says for whom it waited.
class store_room {
 public:
  using milliseconds = std::chrono::milliseconds;

  store_room(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_watch> watch, layout const& where)
      : store_(std::move(store)), watch_(std::move(watch)), where_(where) {}

  /// Waits for all ranks of the job. Every rank makes its transports in one order.
  /// \throws preflight_error when another rank has another layout
  void meet(milliseconds patience) {
    if (where_.world() == 1) return;
    std::string const shape =
        std::to_string(where_.pipeline_ranks) + " pipeline ranks × " + std::to_string(where_.replicas) + " replicas";
    auto const me = where_.global_rank;
    auto const instance = store_->add("transports/" + std::to_string(me), 1);
    prefix_ = "transport" + std::to_string(instance) + "/";
    store_->set(prefix_ + "here/" + std::to_string(me), shape);
    for (int peer = 0; peer < where_.world(); ++peer) {
      auto const theirs = hear("here/" + std::to_string(peer), {.peer = peer, .words = "the other ranks to join"}, patience);
      if (theirs == shape) continue;
      throw preflight_error("this rank has " + shape + ", rank " + std::to_string(peer) + " has " + theirs +
                                ". Remedy: give every rank the same flags",
                            {.rank = me, .peer = peer, .action = "join"});
    }
  }

  void tell(std::string const& key, std::string const& value) { store_->set(prefix_ + key, value); }

  /// What `tell` told, once it is there.
  std::string hear(std::string const& key, awaited const& mine, milliseconds patience) {
    std::string const whole = prefix_ + key;
    auto const until = failure_watch::clock::now() + patience;
    watch_->begin_wait(mine, patience);
    struct end {
      failure_watch& watch;
      ~end() { watch.end_wait(); }
    } const ends{*watch_};
    while (!store_->check({whole})) {
      watch_->throw_if_failed(mine);
      if (failure_watch::clock::now() > until) {
        failure const late{.code = static_cast<int>(exit_code::timeout),
                           .rank = mine.peer,
                           .step = mine.step,
                           .action = mine.action_text(),
                           .reason = failure_watch::no_answer(mine.peer, patience)};
        throw_failure(watch_->report(late), mine, where_.global_rank);
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    return store_->get_to_str(whole);
  }

  /// Everybody's text, by global rank.
  std::vector<std::string> gather(std::string const& mine, long step, milliseconds patience) {
    if (where_.world() == 1) return {mine};
    std::string const round = "texts" + std::to_string(++gathered_) + "/";
    tell(round + std::to_string(where_.global_rank), mine);
    std::vector<std::string> out;
    for (int r = 0; r < where_.world(); ++r) {
      out.push_back(r == where_.global_rank
                        ? mine
                        : hear(round + std::to_string(r), {.peer = r, .words = "gather of texts", .step = step}, patience));
    }
    return out;
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<failure_watch> watch_;
  layout where_;
  std::string prefix_;
  long gathered_ = 0;
};

}  // namespace chevron
