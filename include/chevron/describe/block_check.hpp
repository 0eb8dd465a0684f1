#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Checks that a building block, with its slots computed for every rank of a shape, can be repeated, and counts its chunks in
/// flight.

namespace chevron::detail {

/// One action of a block, on one rank.
struct block_action {
  kind what{};
  int chunk = 0;
  int slot = 0;
  bool when_idle = false;  // a W without a slot: runs in idle slots
  int stage = -1;          // -1: this rank does not have the chunk
};

/// A block with its slots computed for a shape.
struct block_layout {
  int ranks;
  int stages;
  int micro_batches;
  int interval;
  int forwards;            // number of a rank's forwards in a block; forwards are the first items
  int placed;              // number of actions with a slot; these precede actions without
  int items;               // number of all actions
  block_action const* at;  // all ranks' items, rank after rank
  std::int16_t const* rank_of;
};

inline constexpr int longest_interval = 16384;  // so that slot numbers fit into an int for any number of microbatches
inline constexpr int last_block_slot = 262144;

/// The number of slots of an action: B counts as I and W.
constexpr int slots_of(kind what) { return what == kind::backward ? 2 : 1; }

// Values for slots of the interval in which no item starts.
inline constexpr int idle_slot = -1;
inline constexpr int busy_slot = -2;  // busy_slot - k: item k started one slot earlier

/// Writes into `table`, for every rank and slot of the interval, the item that starts in the slot in the steady state. \returns
/// a finding if two actions need one slot, or if a rank has more work than slots
constexpr finding fill_slots(block_layout const& block, int* table) {
  if (block.interval > longest_interval)
    return fault(law::description, "an interval must be at most 16384 slots, not ", block.interval);
  for (int r = 0; r < block.ranks; ++r) {
    block_action const* const mine = block.at + r * block.items;
    int* const slots = table + r * block.interval;
    auto const fault_here = [&](char const* words, std::int64_t number, std::int64_t limit = 0) {
      return finding{.broken = law::description, .rank = r, .number = number, .limit = limit, .words = words};
    };
    int work = 0;
    for (int k = 0; k < block.items; ++k) work += mine[k].stage >= 0 ? slots_of(mine[k].what) : 0;
    if (work > block.interval)
      return fault_here("the work of a rank in one block needs an interval of at least ", work, block.interval);
    for (int s = 0; s < block.interval; ++s) slots[s] = idle_slot;
    for (int k = 0; k < block.items; ++k) {
      block_action const a = mine[k];
      if (a.stage < 0 || a.when_idle) continue;
      if (a.slot < 0) return fault_here("a slot of a block is negative, see max_of; it is ", a.slot);
      if (a.slot > last_block_slot) return fault_here("a slot of a block must be at most 262144, not ", a.slot);
      for (int part = 0; part < slots_of(a.what); ++part) {
        int& taken = slots[(a.slot + part) % block.interval];
        if (taken != idle_slot) {
          block_action const other = mine[taken >= 0 ? taken : busy_slot - taken];
          return {.broken = law::description,
                  .rank = r,
                  .what = make_action(a.what, a.stage, 0),
                  .other = make_action(other.what, other.stage, 0),
                  .links = 2,
                  .words = " must move to another slot, or the blocks repeat at another interval: once repeated it meets "};
        }
        taken = part == 0 ? k : busy_slot - k;
      }
    }
  }
  return {};
}

/// Checks that a block has, for each stage, F and B, or F, I and W, each in a slot after the end of its inputs.
constexpr finding check_block(block_layout const& block) {
  buffer<int> memory(compute_kinds * block.stages);  // by stage and kind: the index of the item, or -1
  int* const item_of = memory.data;
  for (int i = 0; i < compute_kinds * block.stages; ++i) item_of[i] = -1;
  auto const fault_at = [&](law broken, kind what, int stage, char const* words) {
    return finding{.broken = broken, .rank = block.rank_of[stage], .what = make_action(what, stage, 0), .words = words};
  };
  for (int k = 0; k < block.ranks * block.items; ++k) {
    block_action const& a = block.at[k];
    if (a.stage < 0) continue;
    int& first = item_of[a.stage * compute_kinds + static_cast<int>(a.what)];
    if (first >= 0) return fault_at(law::no_duplicate, a.what, a.stage, " stands in the block more than once");
    first = k;
  }
  for (int s = 0; s < block.stages; ++s) {
    int const* const has = item_of + s * compute_kinds;
    bool const whole = has[static_cast<int>(kind::backward)] >= 0;
    bool const split = has[static_cast<int>(gradient_kind(true))] >= 0;
    bool const weight = has[static_cast<int>(kind::backward_weight)] >= 0;
    if (whole && (split || weight))
      return fault_at(law::no_duplicate, kind::backward, s,
                      " would add these gradients twice: the block also has an I or a W of this stage");
    if (has[static_cast<int>(kind::forward)] < 0)
      return fault_at(law::complete, kind::forward, s, "the block must say in which slot");
    if (!whole && !split)
      return fault_at(law::complete, kind::backward, s, "the block must say in which slot, or give an I and a W");
    if (split && !weight)
      return fault_at(law::complete, kind::backward_weight, s,
                      "the block must say in which slot, or name W without one, to run in idle slots");
  }
  finding f;
  for (int s = 0; s < block.stages; ++s) {
    int const* const has = item_of + s * compute_kinds;
    bool const whole = has[static_cast<int>(kind::backward)] >= 0;
    kind const gradient = gradient_kind(!whole);
    auto const starts_after = [&](kind what, kind needed, int stage) {
      block_action const& a = block.at[item_of[s * compute_kinds + static_cast<int>(what)]];
      block_action const& n = block.at[item_of[stage * compute_kinds + static_cast<int>(needed)]];
      if (a.when_idle || a.slot >= n.slot + slots_of(needed)) return true;
      f = fault_at(law::description, what, s, " must have a later slot in the block: it does not wait for the end of ");
      f.other = make_action(needed, stage, 0);
      f.links = 2;
      return false;
    };
    if (s > 0 && !starts_after(kind::forward, kind::forward, s - 1)) return f;
    if (!starts_after(gradient, kind::forward, s)) return f;
    if (s + 1 < block.stages) {
      bool const next_whole = has[compute_kinds + static_cast<int>(kind::backward)] >= 0;
      if (!starts_after(gradient, gradient_kind(!next_whole), s + 1)) return f;
    }
    if (!whole && !starts_after(kind::backward_weight, gradient, s)) return f;
  }
  return {};
}

/// Steps through the slots of one rank in the repeated block.
struct block_walk {
  static constexpr int done = -1;
  static constexpr int waiting_weight = -2;  // a W that fills an idle slot

  block_action const* mine;
  int const* slots;  // the rank's part of the table that `fill_slots` wrote, by slot of the interval
  int interval;
  int slot = 0;
  int phase = 0;    // slot modulo the interval
  int waiting = 0;  // number of W's that wait for an idle slot

  /// Finds the next item that starts before slot `end`, and sets `slot` to its start. \returns the item
  constexpr int next(int end) {
    for (; slot < end; step()) {
      int const here = slots[phase];
      if (here >= 0 && slot >= mine[here].slot) return here;
      if (here <= busy_slot && slot > mine[busy_slot - here].slot) continue;
      if (waiting > 0) return waiting_weight;
    }
    return done;
  }
  constexpr void step() {
    ++slot;
    if (++phase == interval) phase = 0;
  }
};

/// The most chunks in flight on any rank in the steady state.
constexpr int steady_peak(block_layout const& block, int const* table, bool const* leaves_weight) {
  int most = 0;
  for (int r = 0; r < block.ranks; ++r) {
    block_walk walk{block.at + r * block.items, table + r * block.interval, block.interval};
    int end = 0;
    for (int k = 0; k < block.items; ++k) end = walk.mine[k].slot > end ? walk.mine[k].slot : end;
    end += 2 * block.interval;
    int now = 0;
    for (int what = walk.next(end); what != block_walk::done; what = walk.next(end)) {
      kind const k = what == block_walk::waiting_weight ? kind::backward_weight : walk.mine[what].what;
      now += in_flight_change(k, false);
      if (what == block_walk::waiting_weight)
        --walk.waiting;
      else
        walk.waiting += leaves_weight[what] ? 1 : 0;
      most = now > most ? now : most;
      walk.step();
    }
  }
  return most;
}

}  // namespace chevron::detail
