#pragma once

#include <bit>
#include <cstdint>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/rows.hpp>
#include <chevron/tools/search/held.hpp>
#include <chevron/tools/search/problem/objective.hpp>

/// \file
/// An order that local search changes, and the times of its actions. The length after a move is computed from the actions that
/// the move passes.

namespace chevron::search::detail {

/// One order without fused pairs, and the times of its actions.
class replay : public chevron::detail::rows {
 public:
  constexpr replay(plan_view const& from, cost_view const& costs, objective goal)
      : rows(from, from.holds(kind::backward_weight), costs),
        total(from.total()),
        row_of(count * micro_batches),
        time_of(count * micro_batches),
        begin(ranks + 1),
        order(total),
        finish(count * micro_batches),
        after(count * micro_batches),
        at(count * micro_batches),
        sequence_(total),
        place_(count * micro_batches),
        region_(total),
        stale_((total + 63) / 64, zeroed),
        needed_(total, zeroed),
        next_(ranks),
        waits_for_(ranks),
        ready_(ranks),
        span_(goal == objective::span) {
    for (int r = 0; r <= ranks; ++r) begin.data[r] = from.begin[r];
    for (int a = 0; a < row_of.count; ++a) row_of.data[a] = static_cast<std::int16_t>(a / micro_batches);
    for (int a = 0; a < row_of.count; ++a) time_of.data[a] = time_at(a);
    step_graph const graph(from);
    for (int i = 0; i < total; ++i) order.data[i] = graph.number_of(from.actions[i]);
  }

  /// The change of its rank's activation memory by an action of this row, in chunks.
  constexpr double change_of(int row, activation_limit const& memory) const { return held_change(kind_of(row), memory); }

  /// Updates `at` for the actions at positions [from, to] of `order`.
  constexpr void note(int from, int to) {
    for (int i = from; i <= to; ++i) at.data[order.data[i]] = i;
  }
  /// Simulates the order and computes `finish` of every action. \returns false if ranks wait for each other for ever
  constexpr bool play() {
    int const cells = 2 * stages * micro_batches;
    double* const end = finish.data;
    for (int i = 0; i < cells; ++i) end[i] = -1;
    int waiting = 0;
    for (int r = ranks - 1; r >= 0; --r) {
      next_.data[r] = begin.data[r];
      waits_for_.data[r] = -1;
      ready_.data[waiting++] = r;
    }
    int done = 0;
    while (waiting > 0) {
      int const rank = ready_.data[--waiting];
      int const stop = begin.data[rank + 1];
      int i = next_.data[rank];
      double now = i > begin.data[rank] ? free_after(order.data[i - 1]) : 0;
      for (; i < stop; ++i) {
        int const a = order.data[i];
        int const row = row_of.data[a];
        int const time = time_of.data[a];
        if (int const step = fed_by.data[row]; step != 0) {
          double const there = end[a + step];
          if (there < 0) {
            waits_for_.data[rank] = a + step;
            break;
          }
          if (there + lag.data[time] > now) now = there + lag.data[time];
        }
        now += lasts.data[time];
        end[a] = now;
        place_.data[a] = done;
        sequence_.data[done++] = a;
        if (int const step = feeds.data[row]; step != 0) {
          int const consumer = rank_of.data[row_of.data[a + step]];
          if (consumer != rank && waits_for_.data[consumer] == a) {
            waits_for_.data[consumer] = -1;
            ready_.data[waiting++] = consumer;
          }
        }
        now += post.data[time];
      }
      next_.data[rank] = i;
    }
    return done == total;
  }

  /// Writes the order into a plan that has the same actions.
  constexpr void write_to(plan& made) const {
    for (int i = 0; i < total; ++i) made.actions.data[i] = action_of(order.data[i]);
  }

  /// The time at which the rank of action `a` is free again after the action.
  constexpr double free_after(int a) const { return finish.data[a] + post.data[time_of.data[a]]; }
  /// The time at which a rank begins to compute.
  constexpr double begins(int rank) const {
    int const a = order.data[begin.data[rank]];
    return finish.data[a] - lasts.data[time_of.data[a]] + before.data[time_of.data[a]];
  }
  /// A rank's length less the end of its last action: 0 for a makespan, the rank's negated start for a span.
  constexpr double end_value(int rank) const { return span_ ? -begins(rank) : 0; }
  constexpr double length_of(int rank) const {
    return begin.data[rank] == begin.data[rank + 1] ? 0 : finish.data[order.data[begin.data[rank + 1] - 1]] + end_value(rank);
  }
  /// The plan's length by the search's objective. To be called after `play`.
  constexpr double length() const {
    double longest = 0;
    for (int r = 0; r < ranks; ++r) longest = length_of(r) > longest ? length_of(r) : longest;
    return longest;
  }
  /// Computes `after`: the longest path from each action's end to the step's end (span: less the start of the path's last rank).
  constexpr void look_back() {
    double* const rest = after.data;
    for (int r = 0; r < ranks; ++r) next_.data[r] = -1;
    for (int i = total - 1; i >= 0; --i) {
      int const a = sequence_.data[i];
      int const row = row_of.data[a];
      int const rank = rank_of.data[row];
      int const follower = next_.data[rank];
      double most =
          follower < 0 ? end_value(rank) : post.data[time_of.data[a]] + lasts.data[time_of.data[follower]] + rest[follower];
      if (int const step = feeds.data[row]; step != 0) {
        int const there = time_of.data[a + step];
        double const one = lag.data[there] + lasts.data[there] + rest[a + step];
        most = one > most ? one : most;
      }
      rest[a] = most;
      next_.data[rank] = a;
    }
  }
  /// Updates `sequence_`, in which each action comes after its inputs, after one action was moved from `from` to `to` in its
  /// rank's list. \returns false, and changes nothing, if the move makes actions wait for each other in a cycle
  constexpr bool resequence(int from, int to) {
    int* const sequence = sequence_.data;
    int const moved = order.data[to];
    int const passed = order.data[to < from ? to + 1 : to - 1];  // the farthest action that it passed
    int const low = place_.data[to < from ? passed : moved];
    int const high = place_.data[to < from ? moved : passed];
    if (low > high) return true;
    int others = 0;  // actions written to the front of `region_`
    int with = 0;
    bool possible = true;
    if (to < from) {
      // The moved action's direct and indirect inputs go before the actions that it passed.
      with = high - low + 1;
      for (int i = high; i >= low; --i) {
        int const a = sequence[i];
        bool needed = a == moved;
        if (!needed) {
          int const step = feeds.data[row_of.data[a]];
          needed = step != 0 && place_.data[a + step] <= high && needed_.data[place_.data[a + step]];
          int const next = at.data[a] + 1;
          if (!needed && next < begin.data[rank_of.data[row_of.data[a]] + 1]) {
            int const follower = place_.data[order.data[next]];
            needed = follower <= high && follower >= low && needed_.data[follower];
          }
        }
        needed_.data[i] = needed;
        if (needed && a == passed) possible = false;
        if (needed) region_.data[--with] = a;
      }
      int const others_here = high - low + 1 - with;
      if (possible) {
        int write = high;
        for (int i = high; i >= low; --i) {
          if (!needed_.data[i]) sequence[write--] = sequence[i];
        }
        for (int i = 0; i < others_here; ++i) sequence[low + i] = region_.data[with + i];
      }
    } else {
      for (int i = low; i <= high; ++i) {
        int const a = sequence[i];
        bool needed = a == moved;
        if (!needed) {
          int const step = fed_by.data[row_of.data[a]];
          needed = step != 0 && place_.data[a + step] >= low && needed_.data[place_.data[a + step]];
          int const previous = at.data[a] - 1;
          if (!needed && previous >= begin.data[rank_of.data[row_of.data[a]]]) {
            int const leader = place_.data[order.data[previous]];
            needed = leader >= low && leader <= high && needed_.data[leader];
          }
        }
        needed_.data[i] = needed;
        if (needed && a == passed) possible = false;
        if (needed) region_.data[others++] = a;
      }
      if (possible) {
        int write = low;
        for (int i = low; i <= high; ++i) {
          if (!needed_.data[i]) sequence[write++] = sequence[i];
        }
        for (int i = 0; i < others; ++i) sequence[write + i] = region_.data[i];
      }
    }
    for (int i = low; i <= high; ++i) {
      needed_.data[i] = false;
      place_.data[sequence[i]] = i;
    }
    return possible;
  }
  /// Recomputes `finish` for the actions at positions [from, to] and for every later action whose end changes as a result.
  constexpr void replay_from(int from, int to) {
    int low = total;
    for (int i = from; i <= to; ++i) low = mark(order.data[i], low);
    if (to + 1 < total) low = mark(order.data[to + 1], low);
    double* const end = finish.data;
    for (int word = low / 64; word < stale_.count; ++word) {
      while (stale_.data[word] != 0) {
        int const i = word * 64 + std::countr_zero(stale_.data[word]);
        stale_.data[word] &= stale_.data[word] - 1;
        int const a = sequence_.data[i];
        int const row = row_of.data[a];
        int const rank = rank_of.data[row];
        int const position = at.data[a];
        double now = position > begin.data[rank] ? free_after(order.data[position - 1]) : 0;
        if (int const step = fed_by.data[row]; step != 0) {
          double const there = end[a + step] + lag.data[time_of.data[a]];
          now = there > now ? there : now;
        }
        now += lasts.data[time_of.data[a]];
        if (now == end[a]) continue;
        end[a] = now;
        if (position == begin.data[rank]) first_moved_ = true;
        if (position + 1 < begin.data[rank + 1]) mark(order.data[position + 1], total);
        if (int const step = feeds.data[row]; step != 0) mark(a + step, total);
      }
    }
  }
  /// Recomputes `after` for the actions at positions [from, to] and for every earlier action whose path changes as a result.
  constexpr void look_back_from(int from, int to) {
    if (span_ && first_moved_) {
      first_moved_ = false;
      return look_back();
    }
    int high = 0;
    for (int i = from > 0 ? from - 1 : 0; i <= to; ++i) {
      int const a = order.data[i];
      mark(a, total);
      high = place_.data[a] > high ? place_.data[a] : high;
    }
    double* const rest = after.data;
    for (int word = high / 64; word >= 0; --word) {
      while (stale_.data[word] != 0) {
        int const bit = 63 - std::countl_zero(stale_.data[word]);
        stale_.data[word] ^= std::uint64_t{1} << bit;
        int const a = sequence_.data[word * 64 + bit];
        int const row = row_of.data[a];
        int const rank = rank_of.data[row];
        int const position = at.data[a];
        double most = 0;
        if (position + 1 == begin.data[rank + 1]) {
          most = end_value(rank);
        } else {
          int const follower = order.data[position + 1];
          most = post.data[time_of.data[a]] + lasts.data[time_of.data[follower]] + rest[follower];
        }
        if (int const step = feeds.data[row]; step != 0) {
          int const there = time_of.data[a + step];
          double const one = lag.data[there] + lasts.data[there] + rest[a + step];
          most = one > most ? one : most;
        }
        if (most == rest[a]) continue;
        rest[a] = most;
        if (position > begin.data[rank]) mark(order.data[position - 1], total);
        if (int const step = fed_by.data[row]; step != 0) mark(a + step, total);
      }
    }
  }

  /// The longest path through the actions at positions [from, to] in their new order, from times of the other actions before
  /// the move. At least as long as `play` would compute, unless a path leaves these positions and enters them again.
  constexpr double longest_through(int rank, int from, int to, double* ends) const {
    double now = from > begin.data[rank] ? free_after(order.data[from - 1]) : 0;
    for (int i = from; i <= to; ++i) {
      int const a = order.data[i];
      int const time = time_of.data[a];
      if (int const step = fed_by.data[row_of.data[a]]; step != 0) {
        double const there = finish.data[a + step] + lag.data[time];
        now = there > now ? there : now;
      }
      now += lasts.data[time];
      ends[i - from] = now;
      now += post.data[time];
    }
    double longest = 0;
    bool const final = to + 1 == begin.data[rank + 1];
    double behind = 0;  // the longest path from the start of the next action
    if (!final) {
      int const a = order.data[to + 1];
      behind = lasts.data[time_of.data[a]] + after.data[a];
    }
    for (int i = to; i >= from; --i) {
      int const a = order.data[i];
      int const time = time_of.data[a];
      double most = final && i == to ? end_value(rank) : post.data[time] + behind;
      if (int const step = feeds.data[row_of.data[a]]; step != 0) {
        int const there = time_of.data[a + step];
        double const one = lag.data[there] + lasts.data[there] + after.data[a + step];
        most = one > most ? one : most;
      }
      double const through = ends[i - from] + most;
      longest = through > longest ? through : longest;
      behind = lasts.data[time] + most;
    }
    return longest;
  }

  int total;
  buffer<std::int16_t> row_of;  ///< by action number: its row
  buffer<int> time_of;          ///< by number: the action's index in `lasts`, `lag` and `post`
  buffer<int> begin;            ///< by rank: index in `order` of its first action
  buffer<int> order;            ///< action numbers, rank after rank
  buffer<double> finish;        ///< by number: the time of the action's end
  buffer<double> after;         ///< by number: the longest path from the action's end to the step's end
  buffer<int> at;               ///< by number: the action's index in `order`, set by `note`

 private:
  constexpr int mark(int a, int lowest) {
    int const i = place_.data[a];
    stale_.data[i / 64] |= std::uint64_t{1} << (i % 64);
    return i < lowest ? i : lowest;
  }

  buffer<int> sequence_;  // all actions, each after its inputs
  buffer<int> place_;     // by action number: the action's index in `sequence_`
  buffer<int> region_;
  buffer<std::uint64_t> stale_;  // one bit for each index of `sequence_`: its times must be recomputed
  buffer<bool> needed_;
  buffer<int> next_;
  buffer<int> waits_for_;
  buffer<int> ready_;
  bool span_;
  bool first_moved_ = false;
};

}  // namespace chevron::search::detail
