#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>

/// \file
/// A building block with its slots computed for every rank of a shape.

namespace chevron::detail {

/// One action of a block, on one rank.
struct block_action {
  kind what{};
  int chunk = 0;
  int slot = 0;
  bool when_idle = false;  // has no slot of its own
  int stage = -1;          // -1: this rank has no such chunk
};

/// A block with its slots computed for a shape.
struct block_layout {
  int ranks;
  int stages;
  int micro_batches;
  int interval;
  int forwards;            // number of a rank's forwards in a block; they come first
  int placed;              // number of actions with a slot; they come before those without
  int items;               // number of all actions
  block_action const* at;  // rank after rank
  std::int16_t const* rank_of;
};

inline constexpr int longest_interval = 16384;  // so that slots are ints for any number of microbatches
inline constexpr int last_block_slot = 262144;

/// The number of slots of an action: B counts as I and W.
constexpr int slots_of(kind what) { return what == kind::backward ? 2 : 1; }

// Values for slots of the interval in which no item starts.
inline constexpr int idle_slot = -1;
inline constexpr int busy_slot = -2;  // ... minus the item that started one slot earlier

}  // namespace chevron::detail
