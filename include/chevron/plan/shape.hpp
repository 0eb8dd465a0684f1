#pragma once

#include <chevron/plan/text.hpp>

/// \file
/// How large a pipeline is.

namespace chevron {

/// The size of a pipeline: how many ranks, how many microbatches a step, how many chunks (stages on one rank).
struct shape {
  int ranks = 0;          ///< P, pipeline ranks
  int micro_batches = 0;  ///< M, microbatches per step and replica
  int chunks = 0;         ///< V, stages per rank; 0: as many as the placement has by itself

  friend constexpr bool operator==(shape const&, shape const&) = default;
};

constexpr void append(text& out, shape s) {
  out.append("P=").append(s.ranks).append(", M=").append(s.micro_batches);
  if (s.chunks != 0) out.append(", V=").append(s.chunks);
}

}  // namespace chevron
