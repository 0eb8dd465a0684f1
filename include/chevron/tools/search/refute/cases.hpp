#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include <chevron/tools/search/refute/dominance_table.hpp>
#include <chevron/tools/search/refute/integer_durations.hpp>
#include <chevron/tools/search/refute/one_rank.hpp>
#include <chevron/tools/search/refute/windows.hpp>

/// \file
/// Tries all orders of a step that could be as short as a given length, case by case.

namespace chevron::detail {

/// The outcome of trying cases: no order meets the deadline, one order does, or the work ran out.
enum class verdict : std::uint8_t { refuted, met, unknown };

/// Enumerates orders action by action, as Giffler & Thompson (1960) do. Of all actions that can come next, let a be the one
/// that could end first. The next action on a's rank must be one that could start before a's end: a later one would leave room
/// for a before it. If a is a forward for which memory might not suffice so early, the rank may also wait for an action that
/// cannot start yet.
///
/// A case (the beginning of an order) is given up when an action would end too late, when a rank cannot do the rest of its work
/// in time (`one_rank`), or if a refuted case with the same actions done had all ranks free and all tensors arrived no later.
class cases {
 public:
  /// \param work_left a number of steps of inner loops; used steps are subtracted
  cases(integer_durations const& of, bool by_span, std::int64_t& work_left)
      : of_(of),
        by_span_(by_span),
        left_(work_left),
        window_(of, by_span),
        before_(at(of.count)),
        arrival_(at(of.count)),
        place_(at(of.count)),
        chains_on_(at(of.ranks)),
        known_(of.chains()) {
    for (int i = 0; i < of.count; ++i) {
      for (int e = of.first[at(i)]; e < of.first[at(i) + 1]; ++e) {
        integer_durations::edge const& to = of.edges[at(e)];
        before_[at(to.to)].push_back(i);
        // An edge to a stage's input from another rank. Edges between different microbatches only say when a rank begins.
        if (of.rank_of[at(i)] != of.rank_of[at(to.to)] && i % of.micro_batches == to.to % of.micro_batches)
          arrival_[at(to.to)] = {i, to.delay};
      }
    }
    for (std::size_t k = 0; k < of.sorted.size(); ++k) place_[at(of.sorted[k])] = static_cast<int>(k);
    for (int c = 0; c < of.chains(); ++c) chains_on_[at(rank_of_chain(c))].push_back(c);
  }

  /// Searches for an order that takes no longer than the deadline; `shortest` then returns its length. To be called once.
  verdict look(whole_time deadline) {
    deadline_ = deadline;
    left_ -= 4 * of_.count;
    if (!window_.narrow(deadline)) return verdict::refuted;
    done_.assign(at(of_.chains()), 0);
    free_.assign(at(of_.ranks), 0);
    not_next_.assign(at(of_.ranks), 0);
    began_.assign(at(of_.ranks), -1);
    end_.assign(at(of_.count), -1);
    counts_.assign(at(3 * of_.ranks), 0);
    start_ = window_.start;
    changed_.assign(at(of_.count) / 64 + 1, 0);
    looked_at_.assign(at(of_.ranks), 0);
    for (int r = 0; r < of_.ranks; ++r) {
      if (left_ < 0) return verdict::unknown;
      if (!in_time(r)) return verdict::refuted;
    }
    if (left_ < 0) return verdict::unknown;
    return go_through();
  }
  whole_time shortest() const { return shortest_; }
  /// The order that was found: the actions of all ranks, in the order in which they were placed.
  std::vector<int> order() const {
    std::vector<int> out;
    for (node const& one : way_) {
      if (one.taken >= 0) out.push_back(one.taken);
    }
    return out;
  }

 private:
  struct arrival {
    int from = -1;
    whole_time delay = 0;
  };
  /// A branching of the search: the possible next actions of one rank.
  struct node {
    int rank;
    std::size_t next, stop;      ///< untried choices: [next, stop) in `choices_`
    std::size_t first, changes;  ///< indices of its first choice and of its first entry in `changes_`
    whole_time was_free, had_begun, wait_until;
    std::uint64_t not_next, tried;
    int taken;  ///< the action that was chosen last; -1: none yet, or the rank waits
    bool may_wait;
  };

  struct change {
    int action;
    whole_time was;
  };

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int rank_of_chain(int c) const { return of_.rank_of[at(c * of_.micro_batches)]; }
  int next_of(int c) const { return c * of_.micro_batches + done_[at(c)]; }
  whole_time latest(int rank) const {
    return by_span_ && began_[at(rank)] >= 0 ? began_[at(rank)] + deadline_ : windows::unknown;
  }
  double held(int rank) const {
    int const* const done = counts_.data() + 3 * rank;
    if (of_.kinds == 2) return done[0] - done[1];
    return done[0] - done[1] * (1 - of_.kept_for_weight) - done[2] * of_.kept_for_weight;
  }
  bool full(int rank) const { return of_.limited && held(rank) + 1 > of_.most; }
  /// Whether the memory limit can matter for the rest of a rank's work.
  bool tight(int rank) const {
    int const all = of_.stages_on[at(rank)] * of_.micro_batches;
    return of_.limited && held(rank) + all - counts_[at(3 * rank)] > of_.most;
  }

  bool in_time(int rank) {
    chains_left_.clear();
    for (int const c : chains_on_[at(rank)]) chains_left_.push_back({next_of(c), (c + 1) * of_.micro_batches, 0});
    return one_rank::in_time(chains_left_, start_.data(), of_.takes.data(), window_.end.data(), latest(rank), left_);
  }

  void start_no_earlier(int action, whole_time when) {
    if (start_[at(action)] >= when) return;
    changes_.push_back({action, start_[at(action)]});
    start_[at(action)] = when;
    auto const k = at(place_[at(action)]);
    changed_[k / 64] |= std::uint64_t{1} << (k % 64);
  }
  /// Delays a rank's remaining actions until it is free, and all that depend on them. \returns false if any is then too late
  bool timely(int rank) {
    std::size_t const from = changes_.size();
    for (int const c : chains_on_[at(rank)]) {
      if (done_[at(c)] < of_.micro_batches) start_no_earlier(next_of(c), free_[at(rank)]);
    }
    bool good = true;
    for (std::size_t word = 0; word < changed_.size(); ++word) {
      while (changed_[word] != 0) {
        std::size_t const k = word * 64 + static_cast<std::size_t>(std::countr_zero(changed_[word]));
        changed_[word] &= changed_[word] - 1;
        if (!good) continue;
        int const i = of_.sorted[k];
        whole_time const ends = start_[at(i)] + of_.takes[at(i)];
        if (ends > window_.end[at(i)] || ends > latest(of_.rank_of[at(i)])) good = false;
        for (int e = of_.first[at(i)]; e < of_.first[at(i) + 1]; ++e)
          start_no_earlier(of_.edges[at(e)].to, ends + of_.edges[at(e)].delay);
      }
    }
    left_ -= 8 * static_cast<std::int64_t>(changes_.size() - from) + static_cast<std::int64_t>(changed_.size());
    if (!good) return false;
    ++looks_;
    looked_at_[at(rank)] = looks_;
    if (!in_time(rank)) return false;
    for (std::size_t k = from; k < changes_.size(); ++k) {
      int const r = of_.rank_of[at(changes_[k].action)];
      if (looked_at_[at(r)] == looks_) continue;
      looked_at_[at(r)] = looks_;
      if (!in_time(r)) return false;
    }
    return true;
  }
  void undo(std::size_t to) {
    while (changes_.size() > to) {
      start_[at(changes_.back().action)] = changes_.back().was;
      changes_.pop_back();
    }
  }

  verdict go_through() {
    verdict came_out = branch();
    if (came_out != verdict::unknown || left_ < 0) return came_out;
    while (!way_.empty()) {
      node& now = way_.back();
      if (now.next < now.stop) {
        take(now, choices_[now.next++]);
      } else if (now.may_wait) {
        now.may_wait = false;
        free_[at(now.rank)] = now.wait_until;
        not_next_[at(now.rank)] = now.not_next | now.tried;
      } else {
        note();
        choices_.resize(now.first);
        way_.pop_back();
        if (!way_.empty()) take_back(way_.back());
        continue;
      }
      int const rank = now.rank;
      came_out = !timely(rank) || known() ? verdict::refuted : branch();
      if (left_ < 0) return verdict::unknown;
      if (came_out == verdict::met) return came_out;
      if (came_out == verdict::refuted) take_back(way_.back());
    }
    return verdict::refuted;
  }
  void take(node& now, int action) {
    int const c = of_.chain_of(action), r = now.rank;
    now.taken = action;
    end_[at(action)] = start_[at(action)] + of_.takes[at(action)];
    free_[at(r)] = end_[at(action)];
    if (now.had_begun < 0) began_[at(r)] = start_[at(action)];
    not_next_[at(r)] = 0;
    ++done_[at(c)];
    ++counts_[at(3 * r + of_.kind_of_chain(c))];
    known_.put(c);
  }
  void take_back(node& now) {
    int const r = now.rank;
    undo(now.changes);
    free_[at(r)] = now.was_free;
    not_next_[at(r)] = now.not_next;
    if (now.taken < 0) return;
    int const c = of_.chain_of(now.taken);
    end_[at(now.taken)] = -1;
    began_[at(r)] = now.had_begun;
    --done_[at(c)];
    --counts_[at(3 * r + of_.kind_of_chain(c))];
    known_.take(c);
    now.taken = -1;
  }

  /// Puts the possible next actions on the stack. \returns refuted if there are none, met if no action is left
  verdict branch() {
    int first = -1;
    whole_time first_end = 0;
    bool any_left = false;
    for (int r = 0; r < of_.ranks; ++r) {
      bool const no_room = full(r);
      for (std::size_t k = 0; k < chains_on_[at(r)].size(); ++k) {
        int const c = chains_on_[at(r)][k];
        if (done_[at(c)] == of_.micro_batches) continue;
        any_left = true;
        int const i = next_of(c);
        whole_time const ends = start_[at(i)] + of_.takes[at(i)];
        if (first >= 0 && ends > first_end) continue;
        // Of several actions that end at the same time it prefers one that is no forward, since a forward may lack memory.
        if (first >= 0 && ends == first_end && (of_.kind_of_chain(c) == 0 || of_.kind_of_chain(of_.chain_of(first)) != 0))
          continue;
        if (!ready(c, r, k, no_room)) continue;
        first = i;
        first_end = ends;
      }
    }
    left_ -= 4 * of_.chains();
    if (!any_left) {
      measure();
      return verdict::met;
    }
    if (first < 0) {
      note();
      return verdict::refuted;
    }
    int const r = of_.rank_of[at(first)];
    std::size_t const from = choices_.size();
    std::uint64_t tried = 0;
    bool const no_room = full(r);
    for (std::size_t k = 0; k < chains_on_[at(r)].size(); ++k) {
      int const c = chains_on_[at(r)][k];
      if (done_[at(c)] == of_.micro_batches) continue;
      int const i = next_of(c);
      if ((i != first && start_[at(i)] >= first_end) || !ready(c, r, k, no_room)) continue;
      choices_.push_back(i);
      tried |= std::uint64_t{1} << k;
    }
    for (std::size_t i = from + 1; i < choices_.size(); ++i) {
      for (std::size_t k = i; k > from && start_[at(choices_[k])] < start_[at(choices_[k - 1])]; --k)
        std::swap(choices_[k], choices_[k - 1]);
    }
    bool const may_wait = of_.kind_of_chain(of_.chain_of(first)) == 0 && tight(r);
    way_.push_back({r, from, choices_.size(), from, changes_.size(), free_[at(r)], began_[at(r)], first_end, not_next_[at(r)],
                    tried, -1, may_wait});
    return verdict::unknown;
  }
  bool ready(int chain, int rank, std::size_t place, bool no_room) const {
    if ((not_next_[at(rank)] >> place & 1) != 0) return false;
    if (no_room && of_.kind_of_chain(chain) == 0) return false;
    for (int const needed : before_[at(next_of(chain))]) {
      if (end_[at(needed)] < 0) return false;
    }
    return true;
  }
  void measure() {
    shortest_ = 0;
    for (int i = 0; i < of_.count; ++i) {
      whole_time const from = by_span_ ? began_[at(of_.rank_of[at(i)])] : 0;
      shortest_ = std::max(shortest_, end_[at(i)] - from);
    }
  }

  /// Stores in `known_.times` the state that decides about the rest of the step: when ranks are free and have begun, and when
  /// results that are being sent arrive.
  void describe() {
    std::vector<whole_time>& now = known_.times;
    now.clear();
    for (int r = 0; r < of_.ranks; ++r) {
      now.push_back(free_[at(r)]);
      if (by_span_) now.push_back(-began_[at(r)]);
    }
    for (int c = 0; c < of_.chains(); ++c) {
      if (of_.kind_of_chain(c) == 2) continue;
      for (int i = next_of(c); i < (c + 1) * of_.micro_batches; ++i) {
        arrival const& input = arrival_[at(i)];
        if (input.from < 0 || end_[at(input.from)] < 0) break;
        now.push_back(std::max(free_[at(of_.rank_of[at(i)])], end_[at(input.from)] + input.delay));
      }
    }
    left_ -= 2 * static_cast<std::int64_t>(now.size());
  }
  bool known() {
    if (!known_.any(not_next_)) return false;
    describe();
    return known_.no_later(done_, not_next_, left_);
  }
  /// Remembers that the current case is refuted.
  void note() {
    describe();
    known_.add(done_, not_next_);
    left_ -= 64 + of_.chains();
  }

  integer_durations const& of_;
  bool by_span_;
  std::int64_t& left_;
  windows window_;
  whole_time deadline_ = 0, shortest_ = 0;
  std::vector<std::vector<int>> before_;
  std::vector<arrival> arrival_;
  std::vector<int> place_;  // by action: index in `sorted`
  std::vector<std::vector<int>> chains_on_;
  // The current case.
  std::vector<int> done_, counts_;
  std::vector<whole_time> free_, began_, end_, start_;
  std::vector<std::uint64_t> not_next_;  // by rank: chains that may not come next, one bit each
  std::vector<std::uint64_t> changed_;
  std::vector<change> changes_;
  std::vector<node> way_;
  std::vector<int> choices_;
  std::vector<one_rank::chain> chains_left_;
  std::vector<std::int64_t> looked_at_;
  std::int64_t looks_ = 0;
  dominance_table known_;
};

}  // namespace chevron::detail
