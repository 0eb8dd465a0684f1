#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <chevron/run/core/topology.hpp>

/// \file
/// Ranks' places in the grid, for error messages: a global rank's number alone does not tell its shard.

namespace chevron::detail {

/// Stores the grid of this process's job for error messages. Process-wide, since the code that builds many errors knows ranks
/// but no grid: headers of gathers, the failure monitor's thread, other ranks' failures as read from the store. Written by the
/// constructor of a transport, as a process runs one job at a time; read only while an error is formatted.
class job_grid {
 public:
  static void set(topology const& grid) {
    sizes = static_cast<std::uint64_t>(grid.pipeline_ranks) << 32U | static_cast<std::uint32_t>(grid.shards);
  }
  static topology now() {
    std::uint64_t const both = sizes;
    return {.pipeline_ranks = static_cast<int>(both >> 32U), .shards = static_cast<int>(both & 0xffffffffU)};
  }

 private:
  static inline std::atomic<std::uint64_t> sizes{std::uint64_t{1} << 32U | 1U};  // pipeline ranks, shards
};

/// A rank's place in words, ` (replica 0, pipeline rank 1, shard 1)`; empty if stages have one shard.
inline std::string place_of(int rank) {
  topology const grid = job_grid::now();
  if (grid.shards == 1 || rank < 0) return "";
  return " (replica " + std::to_string(grid.replica_of(rank)) + ", pipeline rank " + std::to_string(grid.pipeline_rank_of(rank)) +
         ", shard " + std::to_string(grid.shard_of(rank)) + ")";
}

/// The places of global ranks as the end of a message, `. Places: rank 3 (replica 0, pipeline rank 1, shard 1)`; for more than 8
/// ranks the formula of a rank's number. Empty if stages have one shard.
/// \param ranks the ranks that the message names; negative numbers are left out \param placed a rank with a place already
inline std::string places_of(std::vector<int> const& ranks, int placed = -1) {
  topology const grid = job_grid::now();
  if (grid.shards == 1) return "";
  std::set<int> left(ranks.begin(), ranks.end());
  std::erase_if(left, [&](int rank) { return rank < 0 || rank == placed; });
  if (left.size() > 8) {
    return ". A rank's number is (replica × " + std::to_string(grid.pipeline_ranks) + " + pipeline rank) × " +
           std::to_string(grid.shards) + " + shard";
  }
  std::string out;
  for (int const rank : left) out += (out.empty() ? ". Places: rank " : ", rank ") + std::to_string(rank) + place_of(rank);
  return out;
}

}  // namespace chevron::detail
