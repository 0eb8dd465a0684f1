#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <chevron/prove/whole_times.hpp>
#include <chevron/prove/windows.hpp>

/// \file
/// All orders of a step that could be as short as a deadline, case by case.

namespace chevron::detail {

/// What came of going through cases.
enum class verdict : std::uint8_t { refuted, met, unknown };

/// Makes orders action by action, as Giffler & Thompson (1960) do: of all actions that can come next, the one that could end first
/// names a rank; one that could start there before that end comes next, since otherwise that action would fit in before
/// whatever comes instead. Where it is a forward that memory might not hold so early, the rank may also wait.
///
/// A case is left when an action would end too late, when a rank cannot do what is left even if it may interrupt it (Jackson
/// 1955; Carlier 1982), or when a refuted case with the same actions done had every rank and every tensor ready no later.
class cases {
 public:
  /// \param work_left counted in steps of inner loops, shared by several; what is used is taken off
  cases(whole_times const& of, bool by_span, std::int64_t& work_left) : of_(of), by_span_(by_span), left_(work_left), window_(of, by_span) {
    actions_on_.resize(of.at(of.ranks));
    chains_on_.resize(of.at(of.ranks));
    for (int c = 0; c < of.chains(); ++c) chains_on_[of.at(of.rank_of[of.at(c * of.micro_batches)])].push_back(c);
    before_.resize(of.at(of.count));
    for (int i = 0; i < of.count; ++i) {
      for (int e = of.first[of.at(i)]; e < of.first[of.at(i) + 1]; ++e) {
        before_[of.at(of.edges[of.at(e)].to)].push_back({i, of.edges[of.at(e)].delay});
      }
    }
    std::uint64_t seed = 0x9e3779b97f4a7c15u;
    for (int c = 0; c < of.chains(); ++c) {
      seed += 0x9e3779b97f4a7c15u;
      std::uint64_t x = seed;
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      mark_.push_back((x ^ (x >> 31)) | 1);
    }
  }

  /// Is there an order that takes no longer? `shortest` is then the length of one.
  verdict look(whole_time deadline) {
    deadline_ = deadline;
    left_ -= 4 * of_.count;
    if (!window_.narrow(deadline)) return verdict::refuted;
    if (!possible() || left_ < 0) return verdict::unknown;
    for (int r = 0; r < of_.ranks; ++r) {
      auto& all = actions_on_[of_.at(r)];
      all.clear();
      for (int i = 0; i < of_.count; ++i) {
        if (of_.rank_of[of_.at(i)] == r) all.push_back(i);
      }
      std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return window_.end[of_.at(a)] < window_.end[of_.at(b)]; });
    }
    done_.assign(of_.at(of_.chains()), 0);
    free_.assign(of_.at(of_.ranks), 0);
    not_next_.assign(of_.at(of_.ranks), 0);
    began_.assign(of_.at(of_.ranks), -1);
    end_.assign(of_.at(of_.count), -1);
    start_.assign(of_.at(of_.count), 0);
    known_.clear();
    values_.clear();
    counts_.clear();
    next_.clear();
    hash_ = 0;
    return go_on();
  }
  whole_time shortest() const { return shortest_; }

 private:
  struct needed {
    int from;
    whole_time delay;
  };

  /// Whether cases can be told apart at all.
  bool possible() const {
    for (auto const& chains : chains_on_) {
      if (chains.size() > 64) return false;
    }
    return of_.micro_batches < 256;
  }

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  whole_time latest(int action, int rank) const {
    whole_time const by = window_.end[at(action)];
    return by_span_ && began_[at(rank)] >= 0 ? std::min(by, began_[at(rank)] + deadline_) : by;
  }
  double held(int rank) const {
    double sum = 0;
    for (int const c : chains_on_[at(rank)]) {
      int const k = of_.kind_of_chain(c);
      sum += done_[at(c)] * (k == 0 ? 1 : of_.kinds == 2 ? -1 : k == 1 ? of_.kept_for_weight - 1 : -of_.kept_for_weight);
    }
    return sum;
  }

  /// When each action that is left can start at the earliest; false: one would end too late, or a rank has too much to do.
  bool timely() {
    left_ -= 8 * of_.count;
    for (int const i : of_.sorted) {
      if (end_[at(i)] >= 0) continue;
      int const r = of_.rank_of[at(i)];
      whole_time from = free_[at(r)];
      for (needed const& n : before_[at(i)]) {
        whole_time const ends = end_[at(n.from)] >= 0 ? end_[at(n.from)] : start_[at(n.from)] + of_.takes[at(n.from)];
        from = std::max(from, ends + n.delay);
      }
      start_[at(i)] = from;
      if (from + of_.takes[at(i)] > latest(i, r)) return false;
    }
    for (int r = 0; r < of_.ranks; ++r) {
      if (!fits(r)) return false;
    }
    return true;
  }

  /// Whether a rank can do all that is left, if it may interrupt actions: what starts at a time or later and must end by another
  /// takes no longer than that.
  bool fits(int rank) {
    by_start_.clear();
    sum_.clear();
    by_end_.clear();
    for (int const i : actions_on_[at(rank)]) {
      if (end_[at(i)] >= 0) continue;
      by_start_.push_back({start_[at(i)], static_cast<int>(by_end_.size()), of_.takes[at(i)]});
      by_end_.push_back(latest(i, rank));
      sum_.push_back(0);
    }
    int const n = static_cast<int>(by_end_.size());
    if (left_ < 0) return true;  // `go_on` gives up
    left_ -= std::int64_t{n} * (n / 4 + 8);
    std::sort(by_start_.begin(), by_start_.end(), [](work const& a, work const& b) { return a.start > b.start; });
    for (work const& one : by_start_) {
      whole_time worst = 0;
      for (int k = one.place; k < n; ++k) {
        sum_[at(k)] += one.takes;
        worst = std::max(worst, one.start + sum_[at(k)] - by_end_[at(k)]);
      }
      if (worst > 0) return false;
    }
    return true;
  }

  verdict go_on() {
    if (left_ < 0) return verdict::unknown;
    if (!timely()) return verdict::refuted;
    if (left_ < 0) return verdict::unknown;
    if (refuted_before()) return verdict::refuted;
    // Of all that can come next, what could end first.
    int first = -1;
    whole_time first_end = 0;
    bool any_left = false;
    for (int r = 0; r < of_.ranks; ++r) {
      bool const full = of_.limited && held(r) + 1 > of_.most;
      for (std::size_t k = 0; k < chains_on_[at(r)].size(); ++k) {
        int const c = chains_on_[at(r)][k];
        if (done_[at(c)] == of_.micro_batches) continue;
        any_left = true;
        if (!ready(c, r, k, full)) continue;
        int const i = next_of(c);
        whole_time const ends = start_[at(i)] + of_.takes[at(i)];
        bool const freer = first >= 0 && ends == first_end && of_.kind_of_chain(c) != 0 && of_.kind_of_chain(of_.chain_of(first)) == 0;
        if (first >= 0 && ends >= first_end && !freer) continue;
        first = i;
        first_end = ends;
      }
    }
    if (!any_left) {
      measure();
      return verdict::met;
    }
    if (first < 0) return refute();
    int const rank = of_.rank_of[at(first)];
    bool const full = of_.limited && held(rank) + 1 > of_.most;
    std::uint64_t const banned = not_next_[at(rank)];
    std::uint64_t tried = 0;
    struct choice {
      whole_time start;
      int action;
    };
    std::vector<choice> choices;
    auto const& chains = chains_on_[at(rank)];
    for (std::size_t k = 0; k < chains.size(); ++k) {
      int const c = chains[k];
      if (done_[at(c)] == of_.micro_batches || !ready(c, rank, k, full)) continue;
      int const i = next_of(c);
      if (i != first && start_[at(i)] >= first_end) continue;
      choices.push_back({start_[at(i)], i});
      tried |= std::uint64_t{1} << k;
    }
    std::stable_sort(choices.begin(), choices.end(), [](choice const& a, choice const& b) { return a.start < b.start; });
    whole_time const was_free = free_[at(rank)];
    whole_time const had_begun = began_[at(rank)];
    bool const may_wait = of_.kind_of_chain(of_.chain_of(first)) == 0 && tight(rank);
    for (choice const& one : choices) {
      int const c = of_.chain_of(one.action);
      end_[at(one.action)] = one.start + of_.takes[at(one.action)];
      free_[at(rank)] = end_[at(one.action)];
      if (had_begun < 0) began_[at(rank)] = one.start;
      not_next_[at(rank)] = 0;
      ++done_[at(c)];
      hash_ += mark_[at(c)];
      verdict const found = go_on();
      hash_ -= mark_[at(c)];
      --done_[at(c)];
      end_[at(one.action)] = -1;
      free_[at(rank)] = was_free;
      began_[at(rank)] = had_begun;
      not_next_[at(rank)] = banned;
      if (found != verdict::refuted) return found;
    }
    if (may_wait) {
      free_[at(rank)] = first_end;
      not_next_[at(rank)] = banned | tried;
      verdict const found = go_on();
      free_[at(rank)] = was_free;
      not_next_[at(rank)] = banned;
      if (found != verdict::refuted) return found;
    }
    return refute();
  }

  int next_of(int chain) const { return chain * of_.micro_batches + done_[at(chain)]; }
  bool ready(int chain, int rank, std::size_t place, bool full) const {
    if ((not_next_[at(rank)] >> place & 1) != 0) return false;
    if (full && of_.kind_of_chain(chain) == 0) return false;
    for (needed const& n : before_[at(next_of(chain))]) {
      if (end_[at(n.from)] < 0) return false;
    }
    return true;
  }
  /// Whether the limit can matter for what a rank has left.
  bool tight(int rank) const {
    if (!of_.limited) return false;
    int forwards = 0;
    for (int const c : chains_on_[at(rank)]) {
      if (of_.kind_of_chain(c) == 0) forwards += of_.micro_batches - done_[at(c)];
    }
    return held(rank) + forwards > of_.most;
  }
  void measure() {
    shortest_ = 0;
    for (int i = 0; i < of_.count; ++i) {
      whole_time const from = by_span_ ? began_[at(of_.rank_of[at(i)])] : 0;
      shortest_ = std::max(shortest_, end_[at(i)] - from);
    }
  }

  /// What decides about all that is left: when ranks are free, when what is on its way arrives.
  void describe() {
    now_.clear();
    for (int r = 0; r < of_.ranks; ++r) {
      now_.push_back(free_[at(r)]);
      if (by_span_) now_.push_back(-began_[at(r)]);
    }
    for (int const i : of_.sorted) {
      if (end_[at(i)] >= 0) continue;
      for (needed const& n : before_[at(i)]) {
        if (of_.rank_of[at(n.from)] == of_.rank_of[at(i)] || end_[at(n.from)] < 0) continue;
        now_.push_back(std::max(free_[at(of_.rank_of[at(i)])], end_[at(n.from)] + n.delay));
      }
    }
  }
  std::uint64_t key() const {
    std::uint64_t sum = hash_;
    for (int r = 0; r < of_.ranks; ++r) sum = sum * 31 + not_next_[at(r)];
    return sum;
  }
  bool same_done(std::size_t entry) const {
    std::uint64_t const* const of = counts_.data() + entry * at(of_.chains() + of_.ranks);
    for (int c = 0; c < of_.chains(); ++c) {
      if (of[c] != at(done_[at(c)])) return false;
    }
    for (int r = 0; r < of_.ranks; ++r) {
      if (of[of_.chains() + r] != not_next_[at(r)]) return false;
    }
    return true;
  }
  bool refuted_before() {
    auto const found = known_.find(key());
    if (found == known_.end()) return false;
    describe();
    for (std::int64_t entry = found->second; entry >= 0; entry = next_[static_cast<std::size_t>(entry)].next) {
      left_ -= of_.ranks;
      auto const& one = next_[static_cast<std::size_t>(entry)];
      if (one.count != now_.size() || !same_done(static_cast<std::size_t>(entry))) continue;
      whole_time const* const then = values_.data() + one.from;
      bool no_later = true;
      for (std::size_t i = 0; i < now_.size() && no_later; ++i) no_later = then[i] <= now_[i];
      if (no_later) return true;
    }
    return false;
  }
  verdict refute() {
    describe();
    std::int64_t const entry = static_cast<std::int64_t>(next_.size());
    auto const [place, fresh] = known_.try_emplace(key(), -1);
    next_.push_back({place->second, values_.size(), now_.size()});
    place->second = entry;
    values_.insert(values_.end(), now_.begin(), now_.end());
    for (int const one : done_) counts_.push_back(at(one));
    counts_.insert(counts_.end(), not_next_.begin(), not_next_.end());
    return verdict::refuted;
  }

  struct work {
    whole_time start;
    int place;
    whole_time takes;
  };
  struct known_case {
    std::int64_t next;
    std::size_t from, count;
  };

  whole_times const& of_;
  bool by_span_;
  std::int64_t& left_;
  windows window_;
  whole_time deadline_ = 0, shortest_ = 0;
  std::vector<std::vector<int>> actions_on_, chains_on_;
  std::vector<std::vector<needed>> before_;
  std::vector<std::uint64_t> mark_, not_next_, counts_;
  std::vector<int> done_;
  std::vector<whole_time> free_, began_, end_, start_, values_, now_, by_end_, sum_;
  std::vector<work> by_start_;
  std::unordered_map<std::uint64_t, std::int64_t> known_;
  std::vector<known_case> next_;
  std::uint64_t hash_ = 0;
};

}  // namespace chevron::detail
