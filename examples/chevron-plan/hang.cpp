#include "hang.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "message_offsets.hpp"

namespace plan_program {
namespace {

constexpr std::int64_t second = 1'000'000'000;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Sizes that all members of a collective must have alike.
std::pair<std::int64_t, std::int64_t> common_sizes(recorded_operation const& one) {
  bool const each_its_own = one.name.find("all_to_all") != std::string::npos || one.name.find("alltoall") != std::string::npos;
  if (each_its_own) return {0, 0};
  if (one.name == "gather") return {one.inputs.elements(), 0};    // the root alone has outputs
  if (one.name == "scatter") return {0, one.outputs.elements()};  // the root alone has inputs
  return {one.inputs.elements(), one.outputs.elements()};
}
/// A gather's outputs and a scatter's inputs exist on the root alone, and so may their types.
std::vector<std::string> common_types(recorded_operation const& one) {
  std::vector<std::string> out = one.name == "scatter" ? one.outputs.types : one.inputs.types;
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

/// A number for each operation, the same for operations that are alike: name, group, peer, sizes and types.
class alike_numbers {
 public:
  int of(recorded_operation const& one) {
    return numbers_
        .try_emplace({one.name, one.group, one.peer, one.inputs.sizes, one.outputs.sizes, one.inputs.types},
                     static_cast<int>(numbers_.size()))
        .first->second;
  }

 private:
  using sizes = std::vector<std::vector<std::int64_t>>;
  std::map<std::tuple<std::string, std::string, int, sizes, sizes, std::vector<std::string>>, int> numbers_;
};

/// Whether operations that repeat can be a step of the training, and not only a part of one, such as the forwards of its
/// microbatches. A step has a collective; where the rank has called none at all, messages in both directions with each peer, seen
/// three times.
bool is_whole_round(std::vector<recorded_operation> const& all, int begin, int period, int repeated) {
  auto const is_collective = [](recorded_operation const& one) { return one.is_collective(); };
  auto const from = all.begin() + begin, to = from + period;
  if (std::any_of(from, to, is_collective)) return true;
  if (std::any_of(all.begin(), all.end(), is_collective) || repeated < 2 * period) return false;
  std::map<int, std::pair<bool, bool>> directions;  // by peer
  for (auto one = from; one != to; ++one) (one->is_send() ? directions[one->peer].first : directions[one->peer].second) = true;
  return std::all_of(directions.begin(), directions.end(), [](auto const& d) { return d.second.first && d.second.second; });
}

/// Finds the period with the longest stretch in which each operation equals the operation one period earlier, and the end of this
/// stretch. A stretch is at least one period long; so the operations have been seen twice.
recorded_rounds rounds_of(std::vector<recorded_operation> const& all) {
  constexpr int most = 2048, least = 4, context = 8;
  int const first = std::max(0, static_cast<int>(all.size()) - most), n = static_cast<int>(all.size()) - first;
  alike_numbers numbers;
  std::vector<int> x;
  for (int i = 0; i < n; ++i) x.push_back(numbers.of(all[at(first + i)]));
  int longest = 0, best_period = 0, end = 0;
  for (int p = 1; p <= n / 2; ++p) {
    int run = 0;
    for (int i = p; i <= n; ++i) {
      if (i < n && x[at(i)] == x[at(i - p)]) {
        ++run;
        continue;
      }
      if (run >= std::max(p, least) && run > longest && n - i <= 2 * p) longest = run, best_period = p, end = i;
      run = 0;
    }
  }
  recorded_rounds out;
  if (best_period == 0 || !is_whole_round(all, first + end - best_period, best_period, longest)) return out;
  out.period = best_period;
  out.expected = first + end - best_period;
  if (end == n) return out;
  // The same operations in the same order anywhere before are a change of phase, not a departure.
  int const length = std::min(context, end) + 1;
  auto const tail = x.begin() + (end - length + 1);
  if (std::search(x.begin(), x.begin() + end, tail, tail + length) != x.begin() + end) return {};
  out.departure = first + end;
  return out;
}

/// Of the offsets that a wire's dumps fit, where buffers have wrapped.
enum class reading { likeliest, other };

class graph {
 public:
  graph(recorder_dumps const& dumps, bool whole_group, reading how) : dumps_(dumps), reading_(how) {
    index();
    for (int r = 0; r < dumps.world(); ++r) find_heads(r, whole_group);
    for (int r = 0; r < dumps.world(); ++r) find_waits(r);
  }

  std::vector<recorded_wait> const& waits() const { return waits_; }
  /// Sender and receiver of each wire whose messages cannot be numbered.
  std::vector<std::pair<int, int>> const& undecided() const { return undecided_; }
  bool any_pending() const { return any_pending_; }
  bool has_pending(int rank) const {
    auto const first = heads_.lower_bound({rank, 0});
    return first != heads_.end() && first->first == rank;
  }
  struct message {
    operation_place send, receive;
    std::optional<operation_place> before;  ///< either side of the wire's message before
  };
  std::vector<message> const& messages() const { return messages_; }
  std::map<std::pair<std::string, std::int64_t>, std::map<int, int>> const& collectives() const { return collectives_; }

  recorded_operation const& of(operation_place p) const { return dumps_.by_rank[at(p.rank)]->operations[at(p.index)]; }
  bool is_done(operation_place p) const {
    if (of(p).completed) return true;
    auto const partner = partner_.find({p.rank, p.index});
    return of(p).is_send() && partner != partner_.end() && of(partner->second).completed;
  }
  bool is_head(operation_place p) const { return heads_.count({p.rank, p.index}) != 0; }
  std::optional<operation_place> partner_of(operation_place p) const {
    auto const found = partner_.find({p.rank, p.index});
    return found == partner_.end() ? std::nullopt : std::optional(found->second);
  }
  /// The latest call of the other ranks of an operation; 0: unknown.
  std::int64_t others_called(operation_place p) const {
    if (of(p).is_collective()) {
      std::int64_t out = 0;
      for (auto const& [r, i] : collectives_.at({of(p).group, of(p).sequence})) {
        if (r != p.rank) out = std::max(out, of({r, i}).created);
      }
      return out;
    }
    auto const partner = partner_of(p);
    return partner ? of(*partner).created : 0;
  }

 private:
  void index() {
    std::map<std::tuple<std::string, int, int>, recorded_wire> wires;
    auto const wire_of = [&](std::string const& group, int from, int to) -> recorded_wire& {
      return wires.try_emplace({group, from, to}, recorded_wire{group, from, to, {}, {}}).first->second;
    };
    for (int r = 0; r < dumps_.world(); ++r) {
      if (!dumps_.by_rank[at(r)]) continue;
      auto const& all = dumps_.by_rank[at(r)]->operations;
      for (int i = 0; i < static_cast<int>(all.size()); ++i) {
        recorded_operation const& one = all[at(i)];
        if (one.is_send())
          wire_of(one.group, r, one.peer).sends.push_back(i);
        else if (one.is_receive())
          wire_of(one.group, one.peer, r).receives.push_back(i);
        else
          collectives_[{one.group, one.sequence}].try_emplace(r, i);
      }
    }
    for (auto const& [key, wire] : wires) {
      if (!dumps_.by_rank[at(wire.from)] || !dumps_.by_rank[at(wire.to)]) continue;
      wire_offsets const offsets = offsets_of(dumps_, wire);
      if (!offsets.is_decided()) undecided_.emplace_back(wire.from, wire.to);
      int const offset = reading_ == reading::likeliest ? offsets.likeliest : offsets.other;
      for (int k = std::max(0, -offset); k < static_cast<int>(wire.receives.size()); ++k) {
        if (k + offset >= static_cast<int>(wire.sends.size())) break;
        operation_place const send{wire.from, wire.sends[at(k + offset)]}, receive{wire.to, wire.receives[at(k)]};
        partner_[{send.rank, send.index}] = receive;
        partner_[{receive.rank, receive.index}] = send;
        std::optional<operation_place> before;
        if (k > 0)
          before = operation_place{wire.to, wire.receives[at(k - 1)]};
        else if (k + offset > 0)
          before = operation_place{wire.from, wire.sends[at(k + offset - 1)]};
        messages_.push_back({send, receive, before});
      }
    }
  }

  void find_heads(int r, bool whole_group) {
    if (!dumps_.by_rank[at(r)]) return;
    auto const& all = dumps_.by_rank[at(r)]->operations;
    std::map<std::string, int> head_of;  // the batch of a channel's first pending operation
    for (int i = 0; i < static_cast<int>(all.size()); ++i) {
      recorded_operation const& one = all[at(i)];
      if (is_done({r, i})) continue;
      any_pending_ = true;
      std::string channel = one.group;
      if (!one.is_ordered())
        channel += "#" + std::to_string(i);
      else if (!whole_group && one.peer >= 0)
        channel += "#" + std::to_string(std::min(r, one.peer)) + "-" + std::to_string(std::max(r, one.peer));
      auto const [head, is_first] = head_of.try_emplace(channel, one.batch);
      if (is_first || (one.batch >= 0 && head->second == one.batch)) heads_.insert({r, i});
    }
  }

  void find_waits(int r) {
    if (!dumps_.by_rank[at(r)]) return;
    std::vector<recorded_wait> sends, others;
    auto const& all = dumps_.by_rank[at(r)]->operations;
    for (int i = 0; i < static_cast<int>(all.size()); ++i) {
      operation_place const here{r, i};
      if (!is_head(here)) continue;
      recorded_operation const& one = all[at(i)];
      auto const wait_for = [&](int to, std::optional<operation_place> there) {
        if (there && (is_done(*there) || is_head(*there))) return;
        (one.is_send() ? sends : others).push_back({here, to, there.has_value()});
      };
      if (one.peer >= 0) {
        wait_for(one.peer, partner_of(here));
        continue;
      }
      auto const& callers = collectives_.at({one.group, one.sequence});
      for (int const member : dumps_.groups.at(one.group).ranks) {
        if (member == r) continue;
        auto const found = callers.find(member);
        if (found == callers.end() && is_overwritten(member, one)) continue;
        wait_for(member, found == callers.end() ? std::nullopt : std::optional(operation_place{member, found->second}));
      }
    }
    // A program posts sends and goes on; where it also receives, the receive is the operation that it waits for.
    auto const& kept = others.empty() ? sends : others;
    waits_.insert(waits_.end(), kept.begin(), kept.end());
  }
  /// Whether a rank called a collective so long ago that its buffer has lost it.
  bool is_overwritten(int rank, recorded_operation const& collective) const {
    auto const& dump = dumps_.by_rank[at(rank)];
    if (!dump || dump->is_whole()) return false;
    for (recorded_operation const& one : dump->operations) {
      if (one.is_collective() && one.group == collective.group) return one.sequence > collective.sequence;
    }
    return false;
  }

  recorder_dumps const& dumps_;
  std::map<std::pair<std::string, std::int64_t>, std::map<int, int>> collectives_;
  std::map<std::pair<int, int>, operation_place> partner_;
  std::vector<message> messages_;
  std::set<std::pair<int, int>> heads_;
  std::vector<recorded_wait> waits_;
  std::vector<std::pair<int, int>> undecided_;
  reading reading_;
  bool any_pending_ = false;
};

/// The ranks for which each rank waits, ascending.
using arrows = std::vector<std::vector<int>>;
arrows arrows_of(std::vector<recorded_wait> const& waits, int world) {
  arrows out(at(world));
  for (recorded_wait const& w : waits) out[at(w.from.rank)].push_back(w.to);
  for (auto& of_rank : out) {
    std::sort(of_rank.begin(), of_rank.end());
    of_rank.erase(std::unique(of_rank.begin(), of_rank.end()), of_rank.end());
  }
  return out;
}

/// Whether waits lead to each rank from `start`; to `start` itself, if they lead back.
std::vector<bool> reached_from(int start, arrows const& all) {
  std::vector<bool> out(all.size());
  std::vector<int> open{start};
  while (!open.empty()) {
    int const r = open.back();
    open.pop_back();
    for (int const to : all[at(r)]) {
      if (out[at(to)]) continue;
      out[at(to)] = true;
      open.push_back(to);
    }
  }
  return out;
}

/// Ends a story without a first cause, which is one of the suspects.
void leave_open(hang_story& story, std::set<int> const& suspects) {
  story.cause = hang_cause::undecided;
  story.suspects.assign(suspects.begin(), suspects.end());
  story.culprits.clear();
  story.followers.clear();
  story.further.clear();
  story.at = story.other = std::nullopt;
  story.difference.clear();
}

class judge {
 public:
  judge(recorder_dumps const& dumps, std::int64_t patience, reading how = reading::likeliest)
      : dumps_(dumps), pairs_(dumps, false, how) {
    graph_ = &pairs_;
    if (pairs_.waits().empty() && pairs_.any_pending()) {
      whole_.emplace(dumps, true, how);
      if (!whole_->waits().empty()) graph_ = &*whole_;
    }
    story_.waits = graph_->waits();
    for (auto const& dump : dumps.by_rank) story_.rounds.push_back(dump ? rounds_of(dump->operations) : recorded_rounds{});
    measure();
    decide(patience);
  }
  hang_story take() { return std::move(story_); }
  std::vector<std::pair<int, int>> const& undecided() const { return pairs_.undecided(); }

 private:
  recorded_operation const& of(operation_place p) const { return graph_->of(p); }

  void measure() {
    for (auto const& dump : dumps_.by_rank) {
      if (!dump) continue;
      for (std::size_t i = 1; i < dump->operations.size(); ++i) {
        std::int64_t const a = dump->operations[i - 1].created, b = dump->operations[i].created;
        if (a > 0 && b > a) story_.longest_gap = std::max(story_.longest_gap, b - a);
      }
    }
    for (recorded_wait const& w : story_.waits) {
      if (std::int64_t const since = of(w.from).created; since > 0)
        story_.waited = std::max(story_.waited, dumps_.by_rank[at(w.from.rank)]->written - since);
    }
  }
  bool is_hung(std::int64_t patience) const {
    if (patience >= 0) return story_.waited >= patience;
    std::int64_t limit = std::max(second, 2 * story_.longest_gap);
    for (recorded_wait const& w : story_.waits) {
      if (of(w.from).timeout > 0) limit = std::min(limit, of(w.from).timeout);
      if (of(w.from).created <= 0) return true;  // without times nothing can be said of their length
    }
    return story_.waited >= limit;
  }

  void decide(std::int64_t patience) {
    if (find_mismatch()) return finish();
    if (story_.waits.empty()) {
      story_.cause = graph_->any_pending() ? hang_cause::running : hang_cause::none;
      return;
    }
    if (!is_hung(patience)) {
      story_.cause = hang_cause::patient;
      return;
    }
    find_cycle();
    bool has_end = false;
    for (int const r : ends()) has_end = has_end || !graph_->has_pending(r);
    if (find_departure(!has_end)) return finish();
    if (ends().empty()) drop_posted_ahead();
    if (find_end()) {
      doubt_silence();
      return finish();
    }
    story_.cause = hang_cause::cycle;
    story_.culprits = story_.cycle;
    std::sort(story_.culprits.begin(), story_.culprits.end());
    for (recorded_wait const& w : story_.waits) {
      if (!story_.cycle.empty() && w.from.rank == story_.cycle.front()) {
        story_.at = w.from;
        break;
      }
    }
    finish();
  }

  /// Ranks that others wait for, and that wait for no rank.
  std::set<int> ends() const {
    std::set<int> out;
    for (recorded_wait const& w : story_.waits) out.insert(w.to);
    for (recorded_wait const& w : story_.waits) out.erase(w.from.rank);
    return out;
  }

  bool find_end() {
    std::set<int> const all = ends();
    if (all.empty()) return false;
    std::map<int, int> followers;
    std::map<int, std::int64_t> since;
    arrows const waits = arrows_of(story_.waits, dumps_.world());
    for (int r = 0; r < dumps_.world(); ++r) {
      if (waits[at(r)].empty()) continue;
      std::vector<bool> const reached = reached_from(r, waits);
      for (int const end : all) followers[end] += reached[at(end)] ? 1 : 0;
    }
    for (recorded_wait const& w : story_.waits) {
      auto const [found, is_new] = since.try_emplace(w.to, of(w.from).created);
      if (!is_new) found->second = std::min(found->second, of(w.from).created);
    }
    int const root = *std::min_element(all.begin(), all.end(), [&](int a, int b) {
      return std::tuple(-followers[a], since[a], a) < std::tuple(-followers[b], since[b], b);
    });
    story_.cause = dumps_.by_rank[at(root)] ? hang_cause::silent_rank : hang_cause::absent_rank;
    story_.culprits = {root};
    for (int const r : all) {
      if (r != root) story_.further.push_back(r);
    }
    for (recorded_wait const& w : story_.waits) {
      if (w.to == root && (!story_.at || of(w.from).created < of(*story_.at).created)) story_.at = w.from;
    }
    return true;
  }

  /// A collective that at most half of its members called, while all others wait for no rank, is one too many or one too few.
  /// Rounds tell which; without rounds, since a buffer has wrapped, either may be the first cause.
  void doubt_silence() {
    if (story_.cause != hang_cause::silent_rank || !of(*story_.at).is_collective()) return;
    auto const& callers = graph_->collectives().at({of(*story_.at).group, of(*story_.at).sequence});
    if (2 * callers.size() > dumps_.groups.at(of(*story_.at).group).ranks.size()) return;
    for (auto const& [r, i] : callers) {
      if (dumps_.by_rank[at(r)]->is_whole() || story_.rounds[at(r)].period > 0) return;
    }
    std::set<int> const silent = ends();
    for (recorded_wait const& w : story_.waits) {
      if (w.from == *story_.at && silent.count(w.to) == 0) return;
    }
    std::set<int> suspects(story_.culprits.begin(), story_.culprits.end());
    suspects.insert(story_.further.begin(), story_.further.end());
    for (auto const& [r, i] : callers) suspects.insert(r);
    leave_open(story_, suspects);
    story_.remarks.push_back("the buffers keep too few operations to know how the ranks went on from the collective before");
  }

  /// Ranks that wait for each other, from the lowest one.
  void find_cycle() {
    arrows const waits = arrows_of(story_.waits, dumps_.world());
    for (int r = 0; r < dumps_.world() && story_.cycle.empty(); ++r) {
      if (waits[at(r)].empty() || !reached_from(r, waits)[at(r)]) continue;
      // The shortest way back, breadth first.
      std::map<int, int> before;
      std::vector<int> open{r};
      for (std::size_t k = 0; k < open.size() && before.count(r) == 0; ++k) {
        for (int const to : waits[at(open[k])]) {
          if (before.try_emplace(to, open[k]).second) open.push_back(to);
        }
      }
      for (int back = before[r]; back != r; back = before[back]) story_.cycle.push_back(back);
      story_.cycle.push_back(r);
      std::reverse(story_.cycle.begin(), story_.cycle.end());
    }
  }

  /// A rank that left its rounds: another rank waits for the operation that it left out, it waits for the operation that it
  /// called instead, of another size or in a cycle, or it called a collective that most members did not call.
  bool find_departure(bool in_cycle) {
    std::optional<operation_place> first;
    int departed = 0, known = 0;
    for (int r = 0; r < dumps_.world(); ++r) {
      recorded_rounds const& mine = story_.rounds[at(r)];
      known += mine.period > 0 ? 1 : 0;
      if (!mine.departure) continue;
      ++departed;
      operation_place const here{r, *mine.departure};
      recorded_operation const& expected = of({r, *mine.expected});
      bool const resized = of(here).name == expected.name && of(here).group == expected.group && of(here).peer == expected.peer;
      if (!is_missed(r, expected) && !called_alone(r) && !((in_cycle || resized) && waits_at(here))) continue;
      if (!first || of(here).created < of(*first).created) first = here;
    }
    if (!first || 2 * departed > std::max(known, 2)) return false;  // where most ranks do something new, the program does
    story_.cause = hang_cause::departed;
    story_.culprits = {first->rank};
    story_.at = first;
    return true;
  }
  bool is_missed(int r, recorded_operation const& expected) const {
    return std::any_of(story_.waits.begin(), story_.waits.end(), [&](recorded_wait const& w) {
      recorded_operation const& theirs = of(w.from);
      if (w.to != r || w.called || theirs.group != expected.group) return false;
      if (expected.is_collective()) return theirs.name == expected.name && theirs.is_collective();
      return expected.peer == w.from.rank && theirs.is_send() == expected.is_receive() && theirs.peer == r;
    });
  }
  bool waits_at(operation_place p) const {
    return std::any_of(story_.waits.begin(), story_.waits.end(), [&](recorded_wait const& w) { return w.from == p; });
  }
  /// Whether an operation like this one is older: a new kind of operation may begin a new phase of the program.
  bool called_before(int r, int index) const {
    alike_numbers numbers;
    int const wanted = numbers.of(of({r, index}));
    for (int i = 0; i < index; ++i) {
      if (numbers.of(of({r, i})) == wanted) return true;
    }
    return false;
  }
  bool called_alone(int r) const {
    return std::any_of(story_.waits.begin(), story_.waits.end(), [&](recorded_wait const& w) {
      if (w.from.rank != r || !of(w.from).is_collective()) return false;
      auto const& callers = graph_->collectives().at({of(w.from).group, of(w.from).sequence});
      std::size_t const members = dumps_.groups.at(of(w.from).group).ranks.size();
      return 2 * callers.size() < members || (2 * callers.size() == members && called_before(r, *story_.rounds[at(r)].departure));
    });
  }

  /// Removes waits of operations that were posted ahead. In the round before, the rank called its next operation earlier than
  /// the other ranks called their side of such an operation, so the next operation cannot depend on it.
  void drop_posted_ahead() {
    std::vector<recorded_wait> kept;
    for (recorded_wait const& w : story_.waits) {
      recorded_rounds const& mine = story_.rounds[at(w.from.rank)];
      int const before = w.from.index - mine.period;
      if (mine.period > 0 && !mine.departure && before >= 0) {
        std::int64_t const next = of({w.from.rank, *mine.expected}).created,
                           others = graph_->others_called({w.from.rank, before});
        if (next > 0 && others > next) continue;
      }
      kept.push_back(w);
    }
    if (kept.size() == story_.waits.size() || kept.empty()) return;
    std::vector<recorded_wait> const all = std::exchange(story_.waits, kept);
    if (ends().empty()) story_.waits = all;
  }

  bool find_mismatch() {
    struct candidate {
      std::int64_t since;
      std::vector<int> culprits;
      operation_place at, other;
      std::string difference;
    };
    std::optional<candidate> first;
    auto const offer = [&](candidate one) {
      if (!first || one.since < first->since) first = std::move(one);
    };
    for (auto const& [key, callers] : graph_->collectives()) {
      bool pending = false;
      std::int64_t since = INT64_MAX;
      for (auto const& [r, i] : callers) {
        pending = pending || graph_->is_head({r, i});
        since = std::min(since, of({r, i}).created);
      }
      if (!pending || callers.size() < 2) continue;
      for (char const* difference : {"operations", "sizes", "types"}) {
        std::vector<std::vector<int>> alike;  // ranks, by class
        for (auto const& [r, i] : callers) {
          auto const same = std::find_if(alike.begin(), alike.end(), [&, rank = r, index = i](auto const& members) {
            return !differ(of({members.front(), callers.at(members.front())}), of({rank, index}), difference);
          });
          if (same == alike.end())
            alike.push_back({r});
          else
            same->push_back(r);
        }
        if (alike.size() < 2) continue;
        std::stable_sort(alike.begin(), alike.end(), [](auto const& a, auto const& b) { return a.size() > b.size(); });
        candidate made{since, {}, {}, {}, difference};
        bool const tie = alike[0].size() == alike[1].size();
        for (std::size_t c = tie ? 0 : 1; c < alike.size(); ++c) {
          made.culprits.insert(made.culprits.end(), alike[c].begin(), alike[c].end());
        }
        if (tie) keep_departed(made.culprits);
        std::sort(made.culprits.begin(), made.culprits.end());
        auto const& odd =
            std::find(alike[0].begin(), alike[0].end(), made.culprits.front()) == alike[0].end() ? alike[0] : alike[1];
        made.at = {made.culprits.front(), callers.at(made.culprits.front())};
        made.other = {odd.front(), callers.at(odd.front())};
        offer(std::move(made));
        break;
      }
    }
    for (auto const& [send, receive, before] : graph_->messages()) {
      recorded_operation const &out = of(send), &in = of(receive);
      bool const sizes = sent_elements(out) != received_elements(in);
      bool const types = !same_types(out, in);
      if ((sizes || types) && !in.completed && (graph_->is_head(send) || graph_->is_head(receive))) {
        candidate made{std::min(out.created, in.created), {send.rank, receive.rank}, send, receive, sizes ? "sizes" : "types"};
        if (before) {
          recorded_operation const& was = of(*before);
          std::int64_t const usual = was.is_send() ? sent_elements(was) : received_elements(was);
          bool const sent_other = sizes ? sent_elements(out) != usual : types_of(out) != types_of(was);
          bool const took_other = sizes ? received_elements(in) != usual : types_of(in) != types_of(was);
          if (sent_other != took_other) made.culprits = {sent_other ? send.rank : receive.rank};
        }
        if (made.culprits.size() == 2) keep_departed(made.culprits);
        if (made.culprits.front() == receive.rank) std::swap(made.at, made.other);
        std::sort(made.culprits.begin(), made.culprits.end());
        offer(std::move(made));
      }
    }
    if (!first) return false;
    story_.cause = hang_cause::mismatch;
    story_.culprits = first->culprits;
    story_.at = first->at;
    story_.other = first->other;
    story_.difference = first->difference;
    return true;
  }
  static bool differ(recorded_operation const& a, recorded_operation const& b, std::string const& what) {
    if (what == "operations") return a.name != b.name;
    if (what == "sizes") return common_sizes(a) != common_sizes(b);
    return !common_types(a).empty() && !common_types(b).empty() && common_types(a) != common_types(b);
  }
  /// Of several suspects those that left their rounds, if any did.
  void keep_departed(std::vector<int>& suspects) const {
    std::vector<int> out;
    for (int const r : suspects) {
      if (story_.rounds[at(r)].departure) out.push_back(r);
    }
    if (!out.empty()) suspects = out;
  }

  void finish() {
    arrows const waits = arrows_of(story_.waits, dumps_.world());
    for (int r = 0; r < dumps_.world(); ++r) {
      if (waits[at(r)].empty() || std::find(story_.culprits.begin(), story_.culprits.end(), r) != story_.culprits.end()) continue;
      std::vector<bool> const reached = reached_from(r, waits);
      if (std::any_of(story_.culprits.begin(), story_.culprits.end(), [&](int c) { return reached[at(c)]; }))
        story_.followers.push_back(r);
    }
    if (story_.cycle.empty()) find_cycle();
  }

  recorder_dumps const& dumps_;
  graph pairs_;
  std::optional<graph> whole_;
  graph const* graph_ = nullptr;
  hang_story story_;
};

}  // namespace

hang_story find_cause(recorder_dumps const& dumps, std::int64_t patience) {
  judge likeliest(dumps, patience);
  std::vector<std::pair<int, int>> const undecided = likeliest.undecided();
  hang_story story = likeliest.take();
  if (undecided.empty()) return story;
  hang_story const other = judge(dumps, patience, reading::other).take();
  if (other.culprits == story.culprits && other.suspects == story.suspects) return story;
  std::set<int> suspects(story.culprits.begin(), story.culprits.end());
  suspects.insert(story.suspects.begin(), story.suspects.end());
  suspects.insert(other.culprits.begin(), other.culprits.end());
  suspects.insert(other.suspects.begin(), other.suspects.end());
  leave_open(story, suspects);
  for (auto const& [from, to] : undecided) {
    story.remarks.push_back("which send and which receive are one message from rank " + std::to_string(from) + " to rank " +
                            std::to_string(to) + " is not in the dumps: a buffer has wrapped, and no collective divides them");
  }
  return story;
}

}  // namespace plan_program
