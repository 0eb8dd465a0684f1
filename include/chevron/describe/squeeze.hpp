#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A building block, worked out for every rank, is checked, repeated, and squeezed into per-rank lists.

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

// What a rank does in one slot of the interval, where it is not the item that starts there.
inline constexpr int idle_slot = -1;
inline constexpr int busy_slot = -2;  // ... minus the item that started one slot earlier

/// Fills in, for every rank and slot modulo the interval, what the rank does there once all blocks run. Two actions in one
/// slot, or more work than slots, are findings.
constexpr finding fill_slots(block_layout const& block, int* table) {
  finding f;
  f.broken = law::description;
  if (block.interval > longest_interval) {
    f.words = "an interval must be at most 16384 slots, not ";
    f.number = block.interval;
    return f;
  }
  for (int r = 0; r < block.ranks; ++r) {
    block_action const* const mine = block.at + r * block.items;
    int* const slots = table + r * block.interval;
    f.rank = r;
    int work = 0;
    for (int k = 0; k < block.items; ++k) work += mine[k].stage >= 0 ? slots_of(mine[k].what) : 0;
    if (work > block.interval) {
      f.words = "what a rank does in one block needs an interval of at least ";
      f.number = work;
      f.limit = block.interval;
      return f;
    }
    for (int s = 0; s < block.interval; ++s) slots[s] = idle_slot;
    for (int k = 0; k < block.items; ++k) {
      block_action const a = mine[k];
      if (a.stage < 0 || a.when_idle) continue;
      if (a.slot < 0 || a.slot > last_block_slot) {
        f.words =
            a.slot < 0 ? "a slot of a block is negative, see max_of; it is " : "a slot of a block must be at most 262144, not ";
        f.number = a.slot;
        return f;
      }
      for (int part = 0; part < slots_of(a.what); ++part) {
        int& taken = slots[(a.slot + part) % block.interval];
        if (taken != idle_slot) {
          f.what = make_action(a.what, a.stage, 0);
          block_action const other = mine[taken >= 0 ? taken : busy_slot - taken];
          f.other = make_action(other.what, other.stage, 0);
          f.links = 2;
          f.words = " must move to another slot, or the blocks repeat at another interval: once repeated it meets ";
          return f;
        }
        taken = part == 0 ? k : busy_slot - k;
      }
    }
  }
  return {};
}

/// Whether a block holds, for each stage, F and B, or F, I and W, each in a slot after what it needs.
constexpr finding check_block(block_layout const& block) {
  buffer<int> memory(compute_kinds * block.stages);  // by stage and kind: the item
  int* const item_of = memory.data;
  for (int i = 0; i < compute_kinds * block.stages; ++i) item_of[i] = -1;
  finding f;
  for (int r = 0; r < block.ranks; ++r) {
    for (int k = r * block.items; k < (r + 1) * block.items; ++k) {
      if (block.at[k].stage < 0) continue;
      int& first = item_of[block.at[k].stage * compute_kinds + static_cast<int>(block.at[k].what)];
      if (first >= 0) {
        f.broken = law::no_duplicate;
        f.rank = r;
        f.what = make_action(block.at[k].what, block.at[k].stage, 0);
        f.words = " stands in the block more than once";
        return f;
      }
      first = k;
    }
  }
  for (int s = 0; s < block.stages; ++s) {
    int const* const has = item_of + s * compute_kinds;
    bool const whole = has[static_cast<int>(kind::backward)] >= 0;
    bool const split = has[static_cast<int>(kind::backward_input)] >= 0;
    bool const weight = has[static_cast<int>(kind::backward_weight)] >= 0;
    f.rank = block.rank_of[s];
    f.what = make_action(kind::backward, s, 0);
    if (whole && (split || weight)) {
      f.broken = law::no_duplicate;
      f.words = " would add these gradients twice: the block also has an I or a W of this stage";
      return f;
    }
    f.broken = law::complete;
    if (has[static_cast<int>(kind::forward)] < 0) {
      f.what = make_action(kind::forward, s, 0);
      f.words = "the block must say in which slot";
    } else if (!whole && !split) {
      f.words = "the block must say in which slot, or give an I and a W";
    } else if (split && !weight) {
      f.what = make_action(kind::backward_weight, s, 0);
      f.words = "the block must say in which slot, or name W without one, to run in idle slots";
    } else {
      continue;
    }
    return f;
  }
  f.broken = law::description;
  f.links = 2;
  f.words = " must have a later slot in the block: it does not wait for the end of ";
  for (int s = 0; s < block.stages; ++s) {
    int const* const has = item_of + s * compute_kinds;
    bool const whole = has[static_cast<int>(kind::backward)] >= 0;
    kind const gradient = whole ? kind::backward : kind::backward_input;
    auto const starts_after = [&](kind what, kind needed, int stage) {
      block_action const& a = block.at[item_of[s * compute_kinds + static_cast<int>(what)]];
      block_action const& n = block.at[item_of[stage * compute_kinds + static_cast<int>(needed)]];
      if (a.when_idle || a.slot >= n.slot + slots_of(needed)) return true;
      f.rank = block.rank_of[s];
      f.what = make_action(what, s, 0);
      f.other = make_action(needed, stage, 0);
      return false;
    };
    if (s > 0 && !starts_after(kind::forward, kind::forward, s - 1)) return f;
    if (!starts_after(gradient, kind::forward, s)) return f;
    if (s + 1 < block.stages) {
      bool const next_whole = has[compute_kinds + static_cast<int>(kind::backward)] >= 0;
      if (!starts_after(gradient, next_whole ? kind::backward : kind::backward_input, s + 1)) return f;
    }
    if (!whole && !starts_after(kind::backward_weight, kind::backward_input, s)) return f;
  }
  return {};
}

/// Goes through one rank's slots as the repeated block has them.
struct block_walk {
  static constexpr int done = -1;
  static constexpr int waiting_weight = -2;  // a W that fills an idle slot

  block_action const* mine;
  int const* slots;  // of the rank, modulo the interval
  int interval;
  int slot = 0;
  int phase = 0;    // slot modulo the interval
  int waiting = 0;  // W's that wait for an idle slot

  /// The next thing that starts before `end`; it starts at `slot`.
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

/// The most chunks in flight on any rank once all blocks run.
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
      if (k == kind::forward)
        ++now;
      else if (k != kind::backward_input)
        --now;
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

/// Squeezes the repeated block: played slot by slot, each rank takes what it may as soon as it can.
///
/// A rank's list has three parts. Up to its first gradient in the block's order it may take its forwards in any order, and
/// again everything from the slot in which the last microbatch enters the pipeline; between the two it keeps to the block's
/// order, W's in idle slots included. Where any order will do, a rank takes, of what is ready, what comes first in the block's
/// order, and a W without a slot only if there is nothing else. A forward that overtakes others waits until all of them fit in
/// beside it.
///
/// This comes to an end: of what has not run, take what has the earliest slot. All it needs has run, it is the first of its rank,
/// and if it is a forward there is room, since whatever overtook it left room.
class squeeze {
 public:
  constexpr squeeze(block_layout const& block, int const* table, bool const* leaves_weight, int const* gradient_of, int limit)
      : block_(block),
        leaves_weight_(leaves_weight),
        gradient_of_(gradient_of),
        limit_(limit),
        piece_memory_(block.ranks * block.items),
        line_memory_(block.ranks),
        made_memory_(2 * block.stages + 1),
        pieces_(piece_memory_.data),
        lines_(line_memory_.data),
        made_(made_memory_.data) {
    for (int i = 0; i <= 2 * block.stages; ++i) made_[i] = {};
    count* const always = made_ + 2 * block.stages;
    always->taken = never;
    cool_from_ = last_block_slot;
    for (int i = 0; i < block.ranks * block.items; ++i) {
      block_action const& a = block.at[i];
      count* needs = always;
      if (a.what == kind::forward) needs = a.stage > 0 ? made_ + a.stage - 1 : always;
      if (a.what == kind::backward_weight) needs = made_ + block.stages + a.stage;
      // A gradient's own forward has run if the next stage has its gradient.
      if (a.what == kind::backward || a.what == kind::backward_input)
        needs = made_ + (a.stage + 1 < block.stages ? block.stages + a.stage + 1 : a.stage);
      pieces_[i] = {a.what, a.stage, a.stage < 0 || a.when_idle ? never : a.slot, 0, needs};
      if (pieces_[i].slot < cool_from_) cool_from_ = a.slot;
    }
    cool_from_ += (block.micro_batches - 1) * block.interval;
    for (int r = 0; r < block.ranks; ++r) start_line(r, table + r * block.interval);
  }

  /// Writes each rank's actions from `begin[rank]` on, which has room for all.
  template <class Actions, class Begin>
  constexpr void play(Actions& actions, Begin const& begin) {
    int const ranks = block_.ranks;
    int running = 0;
    for (int r = 0; r < ranks; ++r) {
      lines_[r].filled = begin[r];
      running += lines_[r].left > 0 ? 1 : 0;
    }
    int until_look = 0;  // slots until the next look whether everything repeats itself
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

  /// How many microbatches of one stage and direction have been taken, and when the latest ends.
  struct count {
    int taken = 0;
    int last_end = 0;
  };
  /// One action of the block on one rank: the next microbatch it takes, in which slot of the repeated block (`never` without a
  /// slot of its own), and whose count must have reached that microbatch.
  struct piece {
    kind what;
    int stage;
    int slot;
    int micro_batch;
    count const* needs;
  };
  /// One rank's list so far.
  struct line {
    part now{};
    int left = 0;        // actions to come, in all
    int left_warm = 0;   // and in its first part
    int warm_until = 0;  // the slot at which that part ends
    int try_at = 0;      // when it may act next
    int woken_at = 0;    // when something it may wait for is there
    int in_flight = 0;
    int filled = 0;
    piece* pieces = nullptr;
    int due = 0;  // in order: what comes next, as block_walk says
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
    mine.now = mine.warm_until == cool_from_ ? part::cool : part::warm;  // where nothing is ever steady, all is one part
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

  /// Whether a forward leaves room for the forwards it overtakes.
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

  /// A rank that idles looks again when this stage has something new.
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
    if (a.what == kind::forward) {
      ++mine.in_flight;
      made_[a.stage] = {a.micro_batch, end};
      if (a.stage + 1 < block_.stages) wake(a.stage + 1, end);
    } else {
      if (a.what != kind::backward_weight) {
        made_[block_.stages + a.stage] = {a.micro_batch, end};
        if (a.stage > 0) wake(a.stage - 1, end);
      }
      if (a.what != kind::backward_input) --mine.in_flight;
    }
    if (mine.now == part::in_order) {
      mine.walk.waiting += mine.due == block_walk::waiting_weight ? -1 : leaves_weight_[mine.due] ? 1 : 0;
      mine.walk.step();
      look_ahead(mine);
    } else if (mine.now == part::warm && --mine.left_warm == 0) {
      keep_to_order(mine);
    }
    return result;
  }

  /// How many whole intervals from now on every rank keeps to the block's order.
  constexpr int intervals_left() const {
    int left = block_.micro_batches;
    for (int r = 0; r < block_.ranks; ++r) {
      int const here = (cool_from_ - lines_[r].walk.slot) / block_.interval - 1;
      left = here < left ? here : left;
    }
    return left;
  }

  /// Whether all is as it was when last asked, an interval ago, but one block further on.
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

  /// Copies the last interval so many times; how many slots that fills.
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
  int in_order_ = 0;    // ranks that keep to the block's order now
  buffer<int> before_;  // what `repeats` saw
  buffer<piece> piece_memory_;
  buffer<line> line_memory_;
  buffer<count> made_memory_;
  piece* pieces_;  // rank after rank
  line* lines_;    // by rank
  count* made_;    // forwards by stage, then gradients by stage
};

}  // namespace chevron::detail
