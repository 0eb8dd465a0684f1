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
#include <chevron/run/core/failure.hpp>

/// \file
/// Detects lost ranks by their broken connections.

namespace chevron::detail {

/// The connections that a rank's failure monitor checks. Any thread may call the functions.
class connection_monitor {
 public:
  /// \param pending a receive that stays pending until the connection to this peer breaks
  void add(int peer, c10::intrusive_ptr<c10d::Work> pending) {
    std::lock_guard const hold(mutex_);
    connections_.emplace_back(peer, std::move(pending));
  }
  /// Removes all connections from the monitor; called before the connections are closed.
  void clear() {
    std::lock_guard const hold(mutex_);
    connections_.clear();
  }

  /// Returns the loss of the first rank whose connection is broken; nullopt if no connection is broken.
  std::optional<failure> broken() {
    std::lock_guard const hold(mutex_);
    for (auto const& [peer, pending] : connections_) {
      try {
        pending->abort();  // makes `wait` return at once; `wait` throws if the connection is broken
        pending->wait(std::chrono::milliseconds(1000));
      } catch (std::exception const& e) {
        auto const why = message_of(e);
        // Gloo closed the connection after a timeout. The waiting rank reports the timeout; no rank was lost.
        if (why.find("timeout") != std::string::npos) continue;
        return failure{.code = static_cast<int>(exit_code::peer_lost),
                       .rank = peer,
                       .reason = "rank " + std::to_string(peer) + " was lost (" + why + ")"};
      }
    }
    return std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> connections_;  // peers and pending receives
};

}  // namespace chevron::detail
