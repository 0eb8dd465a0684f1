#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// The memory of ranks whose gradients are freed between their sum over replicas and the stage's next backward.

namespace chevron::train {

/// The memory of a rank whose gradients are freed but for the share of one of `shard` replicas.
struct freed_gradients {
  std::vector<std::int64_t> whole;  ///< bytes by stage; empty: none are freed
  int shard = 1;

  /// The most that a rank holds at any time, as `peak_memory` without freed gradients. A stage's gradients exist from
  /// its first B or I until all of its backwards have run and another stage's are to be made, or the step ends. Then its share
  /// stays.
  /// \param slices of a plan of slices, the factors of its units' transfers
  std::int64_t peak(plan_view const& plan, footprint_view const& takes, int rank, length_view const& slices) const;
  /// The same for bytes of each slice. \param takes by slice of a microbatch; `fixed` is read from the first
  std::int64_t peak(plan_view const& plan, std::span<footprint_view const> takes, int rank) const;
  /// Bytes of a rank's gradients, and the largest of one stage: the others need not exist beside these.
  std::int64_t sum(plan_view const& plan, int rank) const;
  std::int64_t largest(plan_view const& plan, int rank) const;

 private:
  std::int64_t walk(plan_view const& plan, std::span<footprint_view const> takes, int rank, length_view const& slices) const;
};

}  // namespace chevron::train
