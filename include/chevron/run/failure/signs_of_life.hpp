#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/failure/failure.hpp>

/// \file
/// Heartbeats in the job's store, by which ranks without connections detect a lost rank.

namespace chevron::detail {

/// Before all ranks have connected, a lost rank breaks no connection, and not every launcher reports the loss. So each rank
/// increments a number (its sign) in the job's store once a second, and checks the sign of the next rank that has joined. Only
/// the failure monitor's thread calls these functions, except `all_have_met`.
class signs_of_life {
 public:
  /// \param store must outlive this object
  signs_of_life(c10d::Store& store, int rank, int world) : store_(store), rank_(rank), world_(world) {}

  /// Stops writing and checking signs: from now on a lost rank breaks connections.
  void all_have_met() { have_met_ = true; }

  /// Once a second, writes this rank's sign and checks the next rank's sign; must be called more often than once a second.
  /// \returns the loss of a joined rank whose sign has not changed in `most_silent_looks` checks
  std::optional<failure> look() {
    if (have_met_) {
      if (!std::exchange(told_, true)) show(met);
      return std::nullopt;
    }
    auto const now = std::chrono::steady_clock::now();
    if (now < next_) return std::nullopt;
    next_ = now + std::chrono::seconds(1);
    show(std::to_string(++shown_));
    for (int hops = 1; hops < world_; ++hops) {
      int const peer = (rank_ + hops) % world_;
      auto sign = sign_of(store_, peer);
      // Skips ranks that have not joined (the start waits for them), have connected, or have finished.
      if (!sign || *sign == met || *sign == ended) continue;
      bool const silent = peer == watched_ && *sign == seen_;
      watched_ = peer;
      seen_ = std::move(*sign);
      silent_looks_ = silent ? silent_looks_ + 1 : 0;
      if (silent_looks_ < most_silent_looks) return std::nullopt;
      return failure{.rank = peer,
                     .reason = "rank " + std::to_string(peer) + " was lost (no sign of life for " +
                               std::to_string(most_silent_looks) + " s, before all ranks had met)"};
    }
    return std::nullopt;
  }

  /// Writes that this rank has ended normally, for ranks that wait for it to connect.
  void ends() {
    try {
      if (!have_met_) show(ended);
    } catch (std::exception const&) {
      // The store is lost, so no rank can read the sign.
    }
  }
  /// Whether a rank ended normally without having connected to the other ranks.
  static bool has_ended(c10d::Store& store, int rank) { return sign_of(store, rank) == ended; }

 private:
  static constexpr char const* met = "met";
  static constexpr char const* ended = "ended";
  // Counts checks, not seconds: a pause of the whole machine makes no rank silent.
  static constexpr int most_silent_looks = 10;

  static std::string key_of(int rank) { return "alive/" + std::to_string(rank); }
  static std::optional<std::string> sign_of(c10d::Store& store, int rank) {
    return store.check({key_of(rank)}) ? std::optional(store.get_to_str(key_of(rank))) : std::nullopt;
  }
  void show(std::string const& sign) { store_.set(key_of(rank_), sign); }

  c10d::Store& store_;
  int rank_, world_;
  std::atomic<bool> have_met_{false};
  bool told_ = false;
  long shown_ = 0;
  std::chrono::steady_clock::time_point next_{};
  int watched_ = -1, silent_looks_ = 0;
  std::string seen_;
};

}  // namespace chevron::detail
