#pragma once

#include <chevron/describe/block_check.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/step_graph.hpp>

/// \file
/// Repeats a checked building block for every microbatch, and packs the copies into one list of actions for each rank.

namespace chevron::detail {

/// Squeezes the repeated block: plays the block slot by slot, and each rank runs an allowed action as soon as the action's
/// input is ready. Not a policy of `dispatch`, since `squeeze` copies intervals that repeat, which reduces the compiler's work
/// to a fifth (V-Min, P = 8, M = 128).
///
/// A rank's list has three parts: until the first gradient in the block's order, forwards in any order; then all actions in the
/// block's order, W's in idle slots included; from the slot in which the last microbatch enters the pipeline on, all actions in
/// any order. "In any order" means: of its ready actions the rank runs the first in the block's order, and a W without a slot
/// last. A forward that overtakes other forwards starts only if the limit of chunks in flight also has room for the overtaken
/// forwards.
///
/// The squeeze always ends: of the actions that have not run, the action in the earliest slot can run. Its inputs are ready, no
/// other action of its rank precedes it, and a forward has room, since forwards that overtook it left room for it.
class squeeze {
 public:
  constexpr squeeze(block_layout const& block, int const* table, bool const* leaves_weight, int const* gradient_of, int limit)
      : block_(block),
        leaves_weight_(leaves_weight),
        gradient_of_(gradient_of),
        limit_(limit),
        piece_memory_(block.ranks * block.items),
        line_memory_(block.ranks),
        made_memory_(2 * block.stages + 2),
        pieces_(piece_memory_.data),
        lines_(line_memory_.data),
        made_(made_memory_.data) {
    for (count& one : made_memory_) one = {};
    count* const always = made_ + 2 * block.stages;
    count* const nobodys = always + 1;
    always->taken = never;
    cool_from_ = last_block_slot;
    step_graph const graph(block.rank_of, block.stages, 1);
    for (int i = 0; i < block.ranks * block.items; ++i) {
      block_action const& a = block.at[i];
      action const first = make_action(a.what, a.stage < 0 ? 0 : a.stage, 0);
      int const source = graph.source_of(first);
      int const result = graph.makes(first);
      pieces_[i] = {a.what,
                    a.stage,
                    a.stage < 0 || a.when_idle ? never : a.slot,
                    0,
                    source < 0 ? always : made_ + source,
                    result < 0 ? nobodys : made_ + result,
                    graph.to(first),
                    in_flight_change(a.what, false)};
      if (pieces_[i].slot < cool_from_) cool_from_ = a.slot;
    }
    cool_from_ += (block.micro_batches - 1) * block.interval;
    for (int r = 0; r < block.ranks; ++r) start_line(r, table + r * block.interval);
  }

  /// Writes each rank's actions into `actions`, from index `begin[rank]` on. `actions` has room for all.
  template <class Actions, class Begin>
  constexpr void play(Actions& actions, Begin const& begin) {
    int const ranks = block_.ranks;
    int running = 0;
    for (int r = 0; r < ranks; ++r) {
      lines_[r].filled = begin[r];
      running += lines_[r].left > 0 ? 1 : 0;
    }
    int until_look = 0;  // slots until `repeats` is called again
    for (int now = 0; running > 0; ++now) {
      if (in_order_ == ranks && --until_look <= 0) {
        until_look = block_.interval;
        int const times = intervals_left();
        if (times > 0 && repeats(now)) now += copy_repeated(actions, times);
      }
      for (int r = 0; r < ranks; ++r) {
        line& mine = lines_[r];
        if (mine.try_at > now) continue;
        piece* const taken = mine.now != part::in_order               ? in_any_order(mine, now)
                             : mine.due == block_walk::waiting_weight ? waiting_weight(mine)
                             : ready(mine.pieces[mine.due], now)      ? mine.pieces + mine.due
                                                                      : nullptr;
        if (taken == nullptr) {
          mine.try_at = mine.woken_at > now ? now + 1 : never;
          continue;
        }
        actions[mine.filled++] = run(mine, *taken, now);
        running -= --mine.left == 0 ? 1 : 0;
      }
    }
  }

 private:
  static constexpr int never = 2147483647;
  enum class part { warm, in_order, cool };

  /// The state of one result: the number of microbatches that have computed it, and the end of the latest computation.
  struct count {
    int taken = 0;
    int last_end = 0;
  };
  /// One action of the block on one rank. `micro_batch` is the next microbatch to run, `slot` the action's slot for this
  /// microbatch in the repeated block (`never`: no slot). The action can run once the input's count, `*needs`, includes this
  /// microbatch.
  struct piece {
    kind what;
    int stage;
    int slot;
    int micro_batch;
    count const* needs;
    count* makes;   // the count of its result; not read for a W
    int feeds;      // the stage that needs its result, or -1
    int in_flight;  // the change of the rank's chunks in flight by this action
  };
  /// The state of one rank and of its list.
  struct line {
    part now{};
    int left = 0;        // number of actions to come, in all three parts
    int left_warm = 0;   // number of actions to come in the part `warm`
    int warm_until = 0;  // the slot at which the part `warm` ends
    int try_at = 0;      // the earliest slot of the rank's next action
    int woken_at = 0;    // the arrival of the latest input
    int in_flight = 0;
    int filled = 0;
    piece* pieces = nullptr;
    int due = 0;  // in the part `in_order`: the next item of block_walk
    block_walk walk{};
  };

  constexpr void start_line(int r, int const* slots) {
    line& mine = lines_[r];
    mine = {};
    mine.pieces = pieces_ + r * block_.items;
    mine.walk = {block_.at + r * block_.items, slots, block_.interval};
    mine.warm_until = cool_from_;
    for (int k = 0; k < block_.items; ++k) {
      piece const& a = mine.pieces[k];
      if (a.stage < 0) continue;
      mine.left += block_.micro_batches;
      if (a.what != kind::forward && a.slot < mine.warm_until) mine.warm_until = a.slot;
    }
    mine.now = mine.warm_until == cool_from_ ? part::cool : part::warm;  // `cool`: the rank never runs the block's order
    if (mine.now == part::cool) return;
    for (int k = 0; k < block_.items; ++k) {
      int const slot = mine.pieces[k].slot;
      if (slot < mine.warm_until) mine.left_warm += (mine.warm_until - slot + block_.interval - 1) / block_.interval;
    }
    if (mine.left_warm == 0) keep_to_order(mine);
  }

  constexpr void keep_to_order(line& mine) {
    mine.now = part::in_order;
    ++in_order_;
    mine.walk.slot = mine.warm_until;
    mine.walk.phase = mine.warm_until % block_.interval;
    look_ahead(mine);
  }
  constexpr void look_ahead(line& mine) {
    mine.due = mine.walk.next(cool_from_);
    if (mine.due != block_walk::done) return;
    mine.now = part::cool;
    --in_order_;
  }

  static constexpr bool ready(piece const& a, int now) {
    count const& needed = *a.needs;
    return needed.taken > a.micro_batch && (needed.last_end <= now || needed.taken > a.micro_batch + 1);
  }

  /// Whether the limit of chunks in flight has room for a forward and for the forwards that it overtakes.
  constexpr bool fits(line const& mine, piece const& a) const {
    int needed = mine.in_flight + 1;
    for (piece const* other = mine.pieces; other != mine.pieces + block_.forwards; ++other) {
      if (other->slot >= a.slot) continue;
      int const before = (a.slot - other->slot + block_.interval - 1) / block_.interval;
      int const left = block_.micro_batches - other->micro_batch;
      needed += before < left ? before : left;
    }
    return needed <= limit_;
  }

  constexpr piece* in_any_order(line const& mine, int now) const {
    piece* best = nullptr;
    int best_slot = mine.now == part::warm ? mine.warm_until : never;
    piece* const gradients = mine.pieces + (mine.in_flight < limit_ ? 0 : block_.forwards);
    piece* const end = mine.pieces + block_.placed;
    for (piece* a = gradients; a != end; ++a) {
      if (a->slot >= best_slot || !ready(*a, now) || (a->what == kind::forward && !fits(mine, *a))) continue;
      best = a;
      best_slot = a->slot;
    }
    return best != nullptr ? best : waiting_weight(mine);
  }
  /// The first W without a slot whose I has run.
  constexpr piece* waiting_weight(line const& mine) const {
    for (int k = block_.placed; k < block_.items; ++k) {
      piece* const a = mine.pieces + k;
      if (a->stage >= 0 && mine.pieces[gradient_of_[k]].micro_batch > a->micro_batch) return a;
    }
    return nullptr;
  }

  /// Makes an idle rank look again for a ready action at slot `when`, at which an input of this stage arrives.
  constexpr void wake(int stage, int when) {
    line& other = lines_[block_.rank_of[stage]];
    if (other.woken_at < when) other.woken_at = when;
    if (other.try_at > when) other.try_at = when;
  }

  constexpr action run(line& mine, piece& a, int now) {
    int const end = now + slots_of(a.what);
    mine.try_at = end;
    action const result = make_action(a.what, a.stage, a.micro_batch);
    ++a.micro_batch;
    if (a.slot != never) a.slot = a.micro_batch < block_.micro_batches ? a.slot + block_.interval : never;
    mine.in_flight += a.in_flight;
    *a.makes = {a.micro_batch, end};
    if (a.feeds >= 0) wake(a.feeds, end);
    if (mine.now == part::in_order) {
      mine.walk.waiting += mine.due == block_walk::waiting_weight ? -1 : leaves_weight_[mine.due] ? 1 : 0;
      mine.walk.step();
      look_ahead(mine);
    } else if (mine.now == part::warm && --mine.left_warm == 0) {
      keep_to_order(mine);
    }
    return result;
  }

  /// The number of whole intervals from now on in which every rank runs the block's order.
  constexpr int intervals_left() const {
    int left = block_.micro_batches;
    for (int r = 0; r < block_.ranks; ++r) {
      int const here = (cool_from_ - lines_[r].walk.slot) / block_.interval - 1;
      left = here < left ? here : left;
    }
    return left;
  }

  /// Whether the last interval can be copied: the state equals the state at the last call, an interval ago, with each action one
  /// microbatch further.
  constexpr bool repeats(int now) {
    bool same = before_.count > 0;
    if (!same) before_ = buffer<int>(block_.ranks * (block_.items + 3) + 2 * block_.stages);
    int* before = before_.data;
    for (int r = 0; r < block_.ranks; ++r) {
      line const& mine = lines_[r];
      for (int k = 0; k < block_.items; ++k) {
        piece const& a = mine.pieces[k];
        same = same && *before + (a.stage >= 0 ? 1 : 0) == a.micro_batch;
        *before++ = a.micro_batch;
      }
      int const asleep = mine.try_at == never ? never : mine.try_at > now ? mine.try_at - now : 0;
      same = same && before[0] + block_.interval == mine.walk.slot && before[1] == mine.walk.waiting && before[2] == asleep;
      *before++ = mine.walk.slot;
      *before++ = mine.walk.waiting;
      *before++ = asleep;
    }
    for (int i = 0; i < 2 * block_.stages; ++i) {
      int const rest = made_[i].last_end > now ? made_[i].last_end - now : 0;
      same = same && *before == rest;
      *before++ = rest;
    }
    return same;
  }

  /// Appends the actions of the last interval `times` more times, with later microbatches. \returns the number of slots of the
  /// copies
  template <class Actions>
  constexpr int copy_repeated(Actions& actions, int times) {
    int const slots = times * block_.interval;
    for (int r = 0; r < block_.ranks; ++r) {
      line& mine = lines_[r];
      int each = 0;
      for (int k = 0; k < block_.items; ++k) {
        piece& a = mine.pieces[k];
        if (a.stage < 0) continue;
        a.micro_batch += times;
        if (a.slot != never) a.slot += slots;
        ++each;
      }
      int const end = mine.filled + times * each;
      for (int i = mine.filled; i < end; ++i) {
        action a = actions[i - each];
        ++a.micro_batch;
        actions[i] = a;
      }
      mine.filled = end;
      mine.left -= times * each;
      if (mine.try_at != never) mine.try_at += slots;
      mine.woken_at += slots;
      mine.walk.slot += slots;
    }
    for (int i = 0; i < 2 * block_.stages; ++i) {
      made_[i].taken += times;
      made_[i].last_end += slots;
    }
    return slots;
  }

  block_layout const& block_;
  bool const* leaves_weight_;
  int const* gradient_of_;
  int limit_;
  int cool_from_ = 0;
  int in_order_ = 0;    // number of ranks that run the block's order now
  buffer<int> before_;  // the state at the last call of `repeats`
  buffer<piece> piece_memory_;
  buffer<line> line_memory_;
  buffer<count> made_memory_;
  piece* pieces_;  // all ranks' pieces, rank after rank
  line* lines_;    // each rank's state
  count* made_;    // by result, numbered as in a `step_graph` of one microbatch
};

}  // namespace chevron::detail
