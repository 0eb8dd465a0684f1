#pragma once

#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// Watches connections, which break when a rank is lost.

namespace chevron::detail {

/// The connections that a rank's failure monitor checks. Any thread may call its functions.
class connection_monitor {
 public:
  /// \param pending a receive that stays pending until the connection to this peer breaks
  void add(int peer, c10::intrusive_ptr<c10d::Work> pending) {
    std::lock_guard const hold(mutex_);
    connections_.emplace_back(peer, std::move(pending));
  }
  /// Forgets all connections. To be called before they are closed.
  void clear() {
    std::lock_guard const hold(mutex_);
    connections_.clear();
  }

  /// The loss of the first rank whose connection is broken; nullopt if none is.
  std::optional<failure> broken() {
    std::lock_guard const hold(mutex_);
    for (auto const& [peer, pending] : connections_) {
      try {
        pending->abort();  // so that the wait returns at once, unless the connection is broken
        pending->wait(std::chrono::milliseconds(1000));
      } catch (std::exception const& e) {
        auto const why = message_of(e);
        // Gloo gave up waiting and closed the connection: the rank that waited reports a timeout. No rank was lost.
        if (why.find("timeout") != std::string::npos) continue;
        return failure{.rank = peer, .reason = "rank " + std::to_string(peer) + " was lost (" + why + ")"};
      }
    }
    return std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> connections_;  // by peer
};

}  // namespace chevron::detail
