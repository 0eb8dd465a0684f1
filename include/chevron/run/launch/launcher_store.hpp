#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// Hosts the store of a forked job in its launcher, which must never wait for a network.

namespace chevron::detail {

/// Makes the store and publishes the launcher's failure, in a thread. If the network stops answering, that thread blocks, while
/// the launcher goes on to end and to reap its ranks. For a process that ends by `_exit`.
class launcher_store {
 public:
  /// \param make returns the store; if it throws, this process ends, as no job is possible
  template <class Make>
  explicit launcher_store(Make make) {
    std::thread([shared = shared_, make = std::move(make)] {
      try {
        c10::intrusive_ptr<c10d::Store> const store = make();
        std::unique_lock hold(shared->mutex);
        shared->changed.wait(hold, [&] { return shared->lost.has_value(); });
        failure const lost = *shared->lost;
        hold.unlock();
        auto const first = failure_of(store->compareSet("failure", std::string(), to_line(lost)));
        // A failure that another rank published first was printed by that rank.
        if (first.reason == lost.reason) std::fprintf(stderr, "%s\n", lost.reason.c_str());
        hold.lock();
        shared->first = first;
        shared->changed.notify_all();
        shared->changed.wait(hold, [] { return false; });  // keeps the store for ranks that still read it
      } catch (std::exception const& e) {
        std::fprintf(stderr, "launcher: %s\n", message_of(e).c_str());
        ::_exit(static_cast<int>(exit_code::peer_lost));
      }
    }).detach();
  }

  /// Publishes the loss of a rank. Does not wait.
  void publish(failure lost) {
    std::lock_guard const hold(shared_->mutex);
    shared_->lost = std::move(lost);
    shared_->changed.notify_all();
  }

  /// The failure that was published first, by any rank or by `publish`; nullopt without a call of `publish`. If the store does
  /// not answer within a second, the failure of `publish`.
  std::optional<failure> first() {
    std::unique_lock hold(shared_->mutex);
    if (!shared_->lost) return std::nullopt;
    if (shared_->changed.wait_for(hold, std::chrono::seconds(1), [this] { return shared_->first.has_value(); }))
      return shared_->first;
    std::fprintf(stderr, "%s\n", shared_->lost->reason.c_str());
    return shared_->lost;
  }

 private:
  struct state {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<failure> lost, first;
  };
  std::shared_ptr<state> shared_ = std::make_shared<state>();
};

}  // namespace chevron::detail
