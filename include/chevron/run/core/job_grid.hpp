#pragma once

#include <atomic>
#include <cctype>
#include <cstddef>
#include <set>
#include <string>

#include <chevron/run/core/topology.hpp>

/// \file
/// Adds ranks' places in the grid to error messages: a global rank's number alone does not tell its shard.

namespace chevron::detail {

/// Stores the grid of this process's job for error messages; a process runs one job at a time.
class job_grid {
 public:
  static void set(topology const& grid) {
    pipeline_ranks = grid.pipeline_ranks;
    shards = grid.shards;
  }
  /// A rank's place in words, ` (replica 0, pipeline rank 1, shard 1)`; empty if stages have one shard.
  static std::string place_of(int rank) {
    topology const grid = now();
    if (grid.shards == 1 || rank < 0) return "";
    return " (replica " + std::to_string(grid.replica_of(rank)) + ", pipeline rank " +
           std::to_string(grid.pipeline_rank_of(rank)) + ", shard " + std::to_string(grid.shard_of(rank)) + ")";
  }
  /// Appends the places of the global ranks that a message names without a place (`rank 3`, `ranks 1 and 2`): `…. Rank 3
  /// (replica 0, pipeline rank 1, shard 1)`. For more than 8 such ranks, appends the formula of a rank's number instead.
  /// Returns the message unchanged if stages have one shard.
  /// \param peer a rank whose place is appended even if the message does not name the rank; -1: none
  static std::string with_places(std::string message, int peer = -1) {
    topology const grid = now();
    if (grid.shards == 1) return message;
    std::set<int> named, placed;
    if (peer >= 0) named.insert(peer);
    auto const stands = [&](std::string const& word, std::size_t at) { return message.compare(at, word.size(), word) == 0; };
    auto const is = [&](std::size_t at, auto const& kind) {
      return at < message.size() && kind(static_cast<unsigned char>(message[at])) != 0;
    };
    for (std::size_t at = 0; (at = message.find("ank", at)) != std::string::npos;) {
      bool const of_grid = (at > 9 && stands("pipeline r", at - 10)) || (at > 6 && stands("local r", at - 7)) ||
                           (at > 7 && stands("expert r", at - 8));
      bool const is_word = at > 0 && (message[at - 1] == 'r' || message[at - 1] == 'R') && !of_grid;
      at += stands("ank ", at) ? 4U : stands("anks ", at) ? 5U : 3U;
      while (is_word && is(at, [](int c) { return std::isdigit(c); })) {
        std::size_t end = at;
        while (is(end, [](int c) { return std::isdigit(c); })) ++end;
        if (is(end, [](int c) { return std::isalpha(c); }) || end - at > 6) break;  // of an action: `rank 0, 0SEND_F1`
        (stands(" (replica ", end) ? placed : named).insert(std::stoi(message.substr(at, end - at)));
        at = end + (stands(", ", end) ? 2U : stands(" and ", end) ? 5U : 0U);
      }
    }
    std::erase_if(named, [&](int rank) { return placed.contains(rank); });
    if (named.size() > 8) {
      return message + ". A rank's number is (replica × " + std::to_string(grid.pipeline_ranks) + " + pipeline rank) × " +
             std::to_string(grid.shards) + " + shard";
    }
    for (int const rank : named)
      message += (rank == *named.begin() ? ". Rank " : ", rank ") + std::to_string(rank) + place_of(rank);
    return message;
  }

 private:
  static topology now() { return {.pipeline_ranks = pipeline_ranks, .shards = shards}; }
  static inline std::atomic<int> pipeline_ranks{1}, shards{1};
};

}  // namespace chevron::detail
