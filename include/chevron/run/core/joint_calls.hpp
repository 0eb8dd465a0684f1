#pragma once

#include <string>

#include <chevron/run/core/topology.hpp>

/// \file
/// Tells which ranks' stages call collectives together, and so must run the same calls in the same order.

namespace chevron::detail {

/// The ranks whose stages call collectives together: the shards of a stage and, with experts over several replicas, the shards
/// of these replicas (`rank_group::experts`, the larger group). A collective has no name by which ranks could match calls: the
/// n-th call of one rank meets the n-th call of every other rank. So in F, B, I, W and R all these ranks must make the same
/// calls in the same order, and no rank may decide alone to leave a computation out or to run a computation at another time.
///
/// Every part of Chevron in which a rank might decide alone asks this class.
class joint_calls {
 public:
  explicit joint_calls(topology const& where) : shards_(where.shards), replicas_(where.expert_replicas) {}

  /// Whether any rank has such partners. If so, each rank runs computations one at a time, in the program's order, and enqueues
  /// their collectives from the host.
  bool any() const { return shards_ > 1 || replicas_ > 1; }
  /// Whether the ranks belong to several replicas, which have different batches: then no rank may leave out a backward because
  /// its own microbatch counts nothing. Shards of one replica have equal batches, and so decide alike.
  bool over_replicas() const { return replicas_ > 1; }
  /// The ranks in words, for errors: `2 shards`, `experts over 2 replicas`, or both; empty without partners.
  std::string words() const {
    std::string const shards = shards_ > 1 ? std::to_string(shards_) + " shards" : "";
    if (replicas_ == 1) return shards;
    return shards + (shards.empty() ? "" : " and ") + "experts over " + std::to_string(replicas_) + " replicas";
  }

 private:
  int shards_, replicas_;
};

}  // namespace chevron::detail
