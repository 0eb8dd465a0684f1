#pragma once

/// \file
/// What a channel between ranks is for.

namespace chevron {

enum class channel_use {
  edge,   ///< messages from one pipeline rank to another
  sum,    ///< sums, reduce-scatters and gathers of shares over a group: the replicas of a rank's stages, or its shards
  gather  ///< a few numbers of every rank
};

}  // namespace chevron
