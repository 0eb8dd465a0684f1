#pragma once

/// \file
/// Which ranks there are, and which of them this one is.

namespace chevron {

/// Who this rank is. Global rank = replica × pipeline_ranks + pipeline rank: with 2 × 2 the pipelines are {0,1} {2,3} and the
/// replicas of a stage {0,2} {1,3}.
struct topology {
  int pipeline_ranks = 1;  ///< P, ranks of one pipeline
  int replicas = 1;        ///< R, copies of the pipeline
  int global_rank = 0;     ///< this one's, from 0 to P × R - 1

  /// This rank's number in its pipeline, from 0 to P - 1: `plan_view::rank_of` says which stages it has.
  int pipeline_rank() const { return global_rank % pipeline_ranks; }
  /// Which pipeline it belongs to, from 0 to R - 1.
  int replica() const { return global_rank / pipeline_ranks; }
  /// P × R.
  int world() const { return pipeline_ranks * replicas; }
  /// The global rank of another rank of the same pipeline.
  int global_of(int pipeline_rank_of_peer) const { return replica() * pipeline_ranks + pipeline_rank_of_peer; }
};

}  // namespace chevron
