#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A building block, worked out for every rank of a shape.

namespace chevron::detail {

/// One action of a block, on one rank.
struct block_action {
  kind what{};
  int chunk = 0;
  int slot = 0;
  bool when_idle = false;  // has no slot of its own
  int stage = -1;          // -1: this rank has no such chunk
};

/// A block worked out for a shape.
struct block_layout {
  int ranks;
  int stages;
  int micro_batches;
  int interval;
  int forwards;            // actions of a block on a rank: so many forwards come first,
  int placed;              // so many have slots and come before those without,
  int items;               // so many in all
  block_action const* at;  // rank after rank
  std::int16_t const* rank_of;
};

inline constexpr int longest_interval = 16384;  // so that slots are ints for any number of microbatches
inline constexpr int last_block_slot = 262144;

/// Slots an action takes: a whole backward is an input and a weight gradient.
constexpr int slots_of(kind what) { return what == kind::backward ? 2 : 1; }

// Marks of a slot of the interval in which no item starts.
inline constexpr int idle_slot = -1;
inline constexpr int busy_slot = -2;  // ... minus the item that started one slot earlier

}  // namespace chevron::detail
