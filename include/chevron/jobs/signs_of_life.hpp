#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/core/failure.hpp>

/// \file
/// Heartbeats in the job's store, by which ranks detect a lost rank that breaks no connection.

namespace chevron::detail {

/// Before all ranks have connected, and over transports without connections that break (NCCL within a machine, copies), nothing
/// reports a lost rank, unless the launcher does. So each rank increments a number (its sign) in the job's store once a second,
/// and checks the sign of the next rank that writes signs. A rank whose process still exists on the machine of the checking rank
/// is not lost, but stopped: waits for this rank end at their deadline. Only the failure monitor's thread calls these functions,
/// except `all_have_met` and `all_have_left`.
class signs_of_life {
 public:
  /// \param store must outlive this object
  signs_of_life(c10d::Store& store, int rank, int world) : store_(store), rank_(rank), world_(world) {}

  /// Called by a transport that has connected all ranks. \param breaks_connections whether a lost rank breaks the transport's
  /// connections, so that signs are needless
  void all_have_met(bool breaks_connections) {
    if (!breaks_connections) ++without_connections_;
    have_met_ = true;
  }
  /// Called by a transport without connections that break, once all ranks have left it.
  void all_have_left() { --without_connections_; }

  /// Once a second, writes this rank's sign and checks the next rank's sign; must be called more often than once a second.
  /// \returns the loss of a joined rank whose sign has not changed in `most_silent_looks` checks
  std::optional<failure> look() {
    if (is_needless()) {
      if (!std::exchange(told_, true)) show(met);
      return std::nullopt;
    }
    told_ = false;
    auto const now = std::chrono::steady_clock::now();
    if (now < next_) return std::nullopt;
    next_ = now + std::chrono::seconds(1);
    show(std::to_string(++shown_) + " " + process_);
    for (int hops = 1; hops < world_; ++hops) {
      int const peer = (rank_ + hops) % world_;
      auto sign = sign_of(store_, peer);
      // Skips ranks that have not joined (the start waits for them), have connected, or have finished.
      if (!sign || *sign == met || *sign == ended) continue;
      bool const silent = peer == watched_ && *sign == seen_;
      watched_ = peer;
      seen_ = std::move(*sign);
      silent_looks_ = silent ? silent_looks_ + 1 : 0;
      if (silent_looks_ < most_silent_looks || exists_here(seen_.substr(seen_.find(' ') + 1))) return std::nullopt;
      return failure{.rank = peer,
                     .reason = "rank " + std::to_string(peer) + " was lost (no sign of life for " +
                               std::to_string(most_silent_looks) + " s)"};
    }
    return std::nullopt;
  }

  /// Writes that this rank has ended normally, for ranks that wait for it to connect, or still write signs.
  void ends() {
    try {
      if (!is_needless()) show(ended);
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
  bool is_needless() const { return have_met_ && without_connections_ == 0; }

  /// The machine since its start, with the namespace of process numbers, as containers have their own.
  static std::string machine() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::error_code ignored;
    return boot + "/" + std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string();
  }
  /// Whether a process, in the words of `process_`, is of this machine and has not ended; an ended one may remain as a zombie.
  bool exists_here(std::string const& process) const {
    auto const number = process.rfind(' ') + 1;
    if (number == 0 || process_.front() == '/' || process.compare(0, number, process_, 0, number) != 0) return false;
    std::ifstream about("/proc/" + process.substr(number) + "/stat");
    std::string words;
    std::getline(about, words);
    auto const name = words.rfind(')');
    return name != std::string::npos && name + 2 < words.size() && words[name + 2] != 'Z' && words[name + 2] != 'X';
  }

  c10d::Store& store_;
  int rank_, world_;
  std::string process_ = machine() + " " + std::to_string(::getpid());
  std::atomic<bool> have_met_{false};
  std::atomic<int> without_connections_{0};
  bool told_ = false;
  long shown_ = 0;
  std::chrono::steady_clock::time_point next_{};
  int watched_ = -1, silent_looks_ = 0;
  std::string seen_;
};

}  // namespace chevron::detail
