#pragma once

/// \file
/// Which ranks there are, and which of them this one is.

namespace chevron {

/// Who this rank is. Global rank = replica × pipeline_ranks + pipeline rank: with 2 × 2 the pipelines are {0,1} {2,3} and the
/// replicas of a stage {0,2} {1,3}.
struct topology {
  int pipeline_ranks = 1;
  int replicas = 1;
  int global_rank = 0;

  int pipeline_rank() const { return global_rank % pipeline_ranks; }
  int replica() const { return global_rank / pipeline_ranks; }
  int world() const { return pipeline_ranks * replicas; }
  int global_of(int pipeline_rank_of_peer) const { return replica() * pipeline_ranks + pipeline_rank_of_peer; }
};

}  // namespace chevron
