#pragma once

/// \file
/// The purpose of a channel between ranks.

namespace chevron {

/// The operations that a channel carries.
enum class channel_use {
  edge,   ///< messages from one pipeline rank to another
  sum,    ///< sums, reduce-scatters and gathers of shares over a group: the replicas of a rank's stages, or its shards
  gather  ///< gathers of a few numbers of every rank
};

}  // namespace chevron
