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
/// How ranks that are not connected yet notice that one of them is gone.

namespace chevron::detail {

/// Until all ranks have met, a lost one breaks no connection, and not every launcher tells. So each rank counts up a number in
/// the job's store once a second, and looks at that of the next rank that has come. For one thread, the watch's; only
/// `all_have_met` is for others, too.
class signs_of_life {
 public:
  /// \param store outlives this
  signs_of_life(c10d::Store& store, int rank, int world) : store_(store), rank_(rank), world_(world) {}

  /// From here on connections tell of this rank's end.
  void all_have_met() { have_met_ = true; }

  /// To be called again and again.
  /// \returns the loss of a rank that has come and shows no sign of life any more
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

  /// This rank ends well. Who still waits to meet it must know.
  void ends() {
    try {
      if (!have_met_) show(ended);
    } catch (std::exception const&) {
      // The store is gone, and with it everybody who could wait.
    }
  }
  /// Has that rank ended well, and never met the others?
  static bool has_ended(c10d::Store& store, int rank) { return sign_of(store, rank) == ended; }

 private:
  static constexpr char const* met = "met";
  static constexpr char const* ended = "ended";
  // Counted, not by the clock: where the whole machine stood still, nobody was silent.
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
