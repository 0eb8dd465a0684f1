#pragma once

#include <chevron/plan/text.hpp>

/// \file
/// The size of a pipeline.

namespace chevron {

/// The size of a pipeline: numbers of ranks, of microbatches in a step, of chunks (stages on a rank), and of slices into which
/// each sequence is cut.
///
/// Each action computes one *unit*: a microbatch or, with more than one slice, a slice of a microbatch. Slices are numbered in
/// the order of their tokens. Slice s of microbatch m is unit m × slices + s, the number that an action stores.
struct shape {
  int ranks = 0;          ///< P, pipeline ranks
  int micro_batches = 0;  ///< M, microbatches per step and replica
  int chunks = 0;         ///< V, stages per rank; 0: the placement's default
  int slices = 1;         ///< k, slices of each microbatch's sequences

  /// The number of units, which is the number of F's of each stage.
  constexpr int units() const { return micro_batches * slices; }

  friend constexpr bool operator==(shape const&, shape const&) = default;
};

/// Returns the unit of `unit`'s microbatch whose slice is counted from the end: slice s becomes slice `slices` - 1 - s, since
/// backwards run the slices of a microbatch from last to first.
constexpr int mirrored(int unit, int slices) { return unit + slices - 1 - 2 * (unit % slices); }

constexpr void append(text& out, shape s) {
  out.append("P=").append(s.ranks).append(", M=").append(s.micro_batches);
  if (s.chunks != 0) out.append(", V=").append(s.chunks);
  if (s.slices != 1) out.append(", k=").append(s.slices);
}

}  // namespace chevron
