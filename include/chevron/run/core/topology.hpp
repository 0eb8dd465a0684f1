#pragma once

#include <atomic>
#include <string>

/// \file
/// The grid of ranks of a job, and the place of one rank in it.

namespace chevron {

/// The place of a rank: replica, pipeline rank and shard. Shards are ranks within a stage, which hold cuts of its parameters
/// (tensor, sequence and expert parallel); they run the same instructions. Global ranks count shards first, then pipeline ranks,
/// then replicas: (replica × P + pipeline rank) × T + shard. With 2 × 2 × 1 the pipelines are {0,1} {2,3} and the replicas of a
/// stage {0,2} {1,3}.
struct topology {
  int pipeline_ranks = 1;  ///< P, ranks of one pipeline
  int replicas = 1;        ///< R, copies of the pipeline
  int global_rank = 0;     ///< of this rank, from 0 to P × R × T - 1
  int shards = 1;          ///< T, ranks that share each pipeline rank's stages

  /// P × R × T.
  int world() const { return pipeline_ranks * replicas * shards; }
  /// This rank's number in its pipeline, from 0 to P - 1: `plan_view::rank_of` says which stages it has.
  int pipeline_rank() const { return pipeline_rank_of(global_rank); }
  /// The pipeline that it belongs to, from 0 to R - 1.
  int replica() const { return replica_of(global_rank); }
  /// Its cut of each stage, from 0 to T - 1.
  int shard() const { return shard_of(global_rank); }

  /// The same of any global rank.
  int pipeline_rank_of(int rank) const { return rank / shards % pipeline_ranks; }
  int replica_of(int rank) const { return rank / (shards * pipeline_ranks); }
  int shard_of(int rank) const { return rank % shards; }

  /// The global rank at a place.
  int rank_at(int of_replica, int of_pipeline_rank, int of_shard) const {
    return (of_replica * pipeline_ranks + of_pipeline_rank) * shards + of_shard;
  }
  /// The global rank of another rank of the same pipeline, with the same shard.
  int global_of(int pipeline_rank_of_peer) const { return rank_at(replica(), pipeline_rank_of_peer, shard()); }
};

namespace detail {

/// A grid in words: `2 pipeline ranks × 3 replicas`, and its shards where it has several.
inline std::string words_of(topology const& grid) {
  return std::to_string(grid.pipeline_ranks) + " pipeline ranks × " + std::to_string(grid.replicas) + " replicas" +
         (grid.shards > 1 ? " × " + std::to_string(grid.shards) + " shards" : "");
}

/// The grid of this process's job, for error messages: a process belongs to one job at a time.
class job_grid {
 public:
  static void set(topology const& grid) {
    pipeline_ranks = grid.pipeline_ranks;
    shards = grid.shards;
  }
  /// ` (replica 0, pipeline rank 1, shard 1)`; empty where stages have one shard.
  static std::string place_of(int rank) {
    topology const grid{.pipeline_ranks = pipeline_ranks, .shards = shards};
    if (grid.shards == 1 || rank < 0) return "";
    return " (replica " + std::to_string(grid.replica_of(rank)) + ", pipeline rank " +
           std::to_string(grid.pipeline_rank_of(rank)) + ", shard " + std::to_string(grid.shard_of(rank)) + ")";
  }

 private:
  static inline std::atomic<int> pipeline_ranks{1}, shards{1};
};

}  // namespace detail
}  // namespace chevron
