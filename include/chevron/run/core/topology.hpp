#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

/// \file
/// The grid of a job's ranks, and the place of one rank in the grid.

namespace chevron {

/// Groups of ranks for collectives. All members of a rank's groups have the stages of that rank.
enum class rank_group : std::uint8_t {
  replicas,      ///< one rank of each replica: with this rank's stages and shard
  shards,        ///< all shards of this rank's stages, within its replica
  experts,       ///< all shards of `expert_replicas` neighbouring replicas, over which a stage's experts are divided
  expert_copies  ///< one rank of each `experts` group: with this rank's experts
};

/// The sizes of the grid and the place of one rank: replica, pipeline rank and shard. The shards of a stage are ranks that each
/// have a cut of its parameters (tensor, sequence and expert parallel); they run the same instructions. Global ranks count
/// shards first, then pipeline ranks, then replicas: (replica × P + pipeline rank) × T + shard. With P = 2, R = 2, T = 1 the
/// pipelines are ranks {0,1} and {2,3}, and the replicas of a stage are ranks {0,2} or {1,3}.
struct topology {
  int pipeline_ranks = 1;   ///< P, ranks of one pipeline
  int replicas = 1;         ///< R, copies of the pipeline
  int global_rank = 0;      ///< number of this rank, from 0 to P × R × T - 1
  int shards = 1;           ///< T, ranks that share each pipeline rank's stages
  int expert_replicas = 1;  ///< neighbouring replicas over which a stage's experts are divided; a divisor of R

  /// The number of ranks, P × R × T.
  int world() const { return ranks_of_replica() * replicas; }
  /// The number of ranks in a replica, P × T; their global ranks are consecutive.
  int ranks_of_replica() const { return pipeline_ranks * shards; }
  /// This rank's number in its pipeline, from 0 to P - 1; `plan_view::rank_of_stage` returns the pipeline rank of a stage.
  int pipeline_rank() const { return pipeline_rank_of(global_rank); }
  /// This rank's replica, from 0 to R - 1.
  int replica() const { return replica_of(global_rank); }
  /// This rank's number among the shards of its stages, from 0 to T - 1.
  int shard() const { return shard_of(global_rank); }

  /// Pipeline rank, replica and shard of any global rank.
  int pipeline_rank_of(int rank) const { return rank / shards % pipeline_ranks; }
  int replica_of(int rank) const { return rank / ranks_of_replica(); }
  int shard_of(int rank) const { return rank % shards; }

  /// The global rank with this replica, pipeline rank and shard.
  int rank_at(int of_replica, int of_pipeline_rank, int of_shard) const {
    return (of_replica * pipeline_ranks + of_pipeline_rank) * shards + of_shard;
  }
  /// The number of ranks in a group.
  int members(rank_group among) const {
    switch (among) {
      case rank_group::replicas:
        return replicas;
      case rank_group::shards:
        return shards;
      case rank_group::experts:
        return expert_replicas * shards;
      default:
        return replicas / expert_replicas;
    }
  }
  /// This rank's number in its group, from 0.
  int number_in(rank_group among) const {
    switch (among) {
      case rank_group::replicas:
        return replica();
      case rank_group::shards:
        return shard();
      case rank_group::experts:
        return replica() % expert_replicas * shards + shard();
      default:
        return replica() / expert_replicas;
    }
  }
  /// The global rank of a member of this rank's group. \param number of the member in the group, from 0
  int member(rank_group among, int number) const {
    switch (among) {
      case rank_group::replicas:
        return rank_at(number, pipeline_rank(), shard());
      case rank_group::shards:
        return rank_at(replica(), pipeline_rank(), number);
      case rank_group::experts:
        return rank_at(replica() / expert_replicas * expert_replicas + number / shards, pipeline_rank(), number % shards);
      default:
        return rank_at(number * expert_replicas + replica() % expert_replicas, pipeline_rank(), shard());
    }
  }
  /// Returns `among`, except if each replica has all experts: then `experts` becomes the equal group `shards`, and
  /// `expert_copies` becomes `replicas`.
  rank_group plain(rank_group among) const {
    if (expert_replicas > 1) return among;
    return among == rank_group::experts ? rank_group::shards : among == rank_group::expert_copies ? rank_group::replicas : among;
  }
  /// Whether a group needs collectives of its own: it has several ranks and equals no other group (`plain`).
  bool has(rank_group among) const { return members(among) > 1 && plain(among) == among; }
  /// Whether all sizes are at least 1, and `expert_replicas` divides the replicas.
  bool is_valid() const {
    return pipeline_ranks > 0 && replicas > 0 && shards > 0 && expert_replicas > 0 && replicas % expert_replicas == 0;
  }
  /// The global rank of a pipeline rank of the same replica, with the same shard.
  int global_of(int pipeline_rank_of_peer) const { return rank_at(replica(), pipeline_rank_of_peer, shard()); }
};

namespace detail {

inline constexpr rank_group all_groups[] = {rank_group::replicas, rank_group::shards, rank_group::experts,
                                            rank_group::expert_copies};
inline constexpr std::size_t group_count = std::size(all_groups);

/// A grid in words: `2 pipeline ranks × 3 replicas`, then shards and expert replicas if more than one.
inline std::string words_of(topology const& grid) {
  return std::to_string(grid.pipeline_ranks) + " pipeline ranks × " + std::to_string(grid.replicas) + " replicas" +
         (grid.shards > 1 ? " × " + std::to_string(grid.shards) + " shards" : "") +
         (grid.expert_replicas > 1 ? ", experts over " + std::to_string(grid.expert_replicas) + " replicas" : "");
}

}  // namespace detail
}  // namespace chevron
