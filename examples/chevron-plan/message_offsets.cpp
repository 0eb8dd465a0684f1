#include "message_offsets.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace plan_program {
namespace {

constexpr int most_candidates = 256;  // offsets that are tried: so far a rank's sends may be ahead of its peer's receives
constexpr int most_anchors = 16;

class wire_numbers {
 public:
  wire_numbers(recorder_dumps const& dumps, recorded_wire const& wire)
      : wire_(wire),
        from_(*dumps.by_rank[static_cast<std::size_t>(wire.from)]),
        to_(*dumps.by_rank[static_cast<std::size_t>(wire.to)]),
        sends_(static_cast<int>(wire.sends.size())),
        receives_(static_cast<int>(wire.receives.size())),
        received_(before_pending(wire.receives, to_, true)),
        sent_(before_pending(wire.sends, from_, false)) {}

  wire_offsets offsets() const {
    bool const all_sends = has_all_messages(from_), all_receives = has_all_messages(to_);
    if (all_sends && all_receives) return {};
    int greatest = (is_ordered() ? sent_ : sends_) - received_, least = greatest - most_candidates;
    if (all_receives) greatest = std::min(greatest, 0);
    if (all_sends) least = std::max(least, 0);
    std::optional<int> const anchored = by_collectives();
    bool const fits = anchored && *anchored <= greatest && *anchored >= least && is_in_time(*anchored);
    // Gloo's operations count as pending until their program waits for them: what could run may have run.
    if (fits && (!is_ordered() || !could_run(*anchored))) return {*anchored, *anchored};
    if (received_ == receives_) return {greatest, greatest};  // no receive is pending: each pending send waits for its receive
    std::vector<int> possible;
    for (int offset = greatest; offset >= std::max(least, -received_); --offset) {
      if (is_in_time(offset) && !could_run(offset)) possible.push_back(offset);
    }
    if (possible.empty()) return {greatest, greatest};
    return {possible.front(), possible.back()};
  }

 private:
  recorded_operation const& send(int k) const { return from_.operations[at(wire_.sends[at(k)])]; }
  recorded_operation const& receive(int k) const { return to_.operations[at(wire_.receives[at(k)])]; }
  static std::size_t at(int k) { return static_cast<std::size_t>(k); }

  /// How many lie before the first pending one. An operation of a batch is pending until the whole batch has ended, and may
  /// itself have ended before.
  static int before_pending(std::vector<int> const& all, rank_dump const& dump, bool of_batches) {
    auto const pending = std::find_if(all.begin(), all.end(), [&](int i) {
      return !dump.operations[at(i)].completed && (of_batches || dump.operations[at(i)].batch < 0);
    });
    return static_cast<int>(pending - all.begin());
  }
  bool is_ordered() const { return (sends_ > 0 ? send(0) : receive(0)).is_ordered(); }

  /// A rank numbers its point-to-point operations in a group from 1.
  bool has_all_messages(rank_dump const& dump) const {
    if (dump.overwritten + dump.left_out == 0) return true;
    auto const first = std::find_if(dump.operations.begin(), dump.operations.end(),
                                    [&](recorded_operation const& one) { return one.peer >= 0 && one.group == wire_.group; });
    return dump.left_out == 0 && first != dump.operations.end() && first->sequence == 1;
  }

  /// Whether each completed receive ends after its send was called.
  bool is_in_time(int offset) const {
    for (int k = std::max(0, -offset); k < received_ && k + offset < sends_; ++k) {
      if (receive(k).ended > 0 && send(k + offset).created > receive(k).ended) return false;
    }
    return true;
  }

  /// Whether the first pending receive and its send could run, so that it would not be pending.
  bool could_run(int offset) const {
    int const k = received_ + offset;
    if (received_ == receives_ || k >= sends_) return false;
    if (k < 0) return true;  // called before all sends that the dump has
    recorded_operation const &out = send(k), &in = receive(received_);
    if (in.batch >= 0) return false;  // it may have run
    if (sent_elements(out) != received_elements(in) || !same_types(out, in)) return false;
    return is_first(to_, wire_.receives[at(received_)], wire_.from) &&
           (out.completed || is_first(from_, wire_.sends[at(k)], wire_.to));
  }
  /// Whether no operation before it on its channel is pending: of a batch the group's operations, otherwise those with its peer.
  bool is_first(rank_dump const& dump, int index, int peer) const {
    recorded_operation const& one = dump.operations[at(index)];
    if (!one.is_ordered()) return true;
    return std::none_of(dump.operations.begin(), dump.operations.begin() + index, [&](recorded_operation const& before) {
      if (before.completed || before.group != wire_.group) return false;
      return one.batch >= 0 ? before.batch != one.batch : before.peer == peer;
    });
  }

  /// The offset by which most of the last collectives that both ranks completed divide the messages alike on both ranks.
  std::optional<int> by_collectives() const {
    std::map<std::pair<std::string, std::int64_t>, int> const theirs = collectives_of(to_);
    std::map<int, int> votes;
    std::optional<int> best;
    int counted = 0;
    for (int i = static_cast<int>(from_.operations.size()) - 1; i >= 0 && counted < most_anchors; --i) {
      recorded_operation const& one = from_.operations[at(i)];
      if (!one.is_collective() || !one.completed) continue;
      auto const found = theirs.find({one.group, one.sequence});
      if (found == theirs.end()) continue;
      int const offset = before(wire_.sends, i) - before(wire_.receives, found->second);
      ++counted;
      if (++votes[offset] > (best ? votes[*best] : 0)) best = offset;  // of equal counts the later collective's
    }
    return best;
  }
  static int before(std::vector<int> const& all, int index) {
    return static_cast<int>(std::upper_bound(all.begin(), all.end(), index) - all.begin());
  }
  static std::map<std::pair<std::string, std::int64_t>, int> collectives_of(rank_dump const& dump) {
    std::map<std::pair<std::string, std::int64_t>, int> out;
    for (int i = 0; i < static_cast<int>(dump.operations.size()); ++i) {
      recorded_operation const& one = dump.operations[at(i)];
      if (one.is_collective() && one.completed) out.try_emplace({one.group, one.sequence}, i);
    }
    return out;
  }

  recorded_wire const& wire_;
  rank_dump const &from_, &to_;
  int sends_, receives_;  // that the dumps have
  int received_, sent_;   // that lie before the first one which is pending for certain
};

}  // namespace

wire_offsets offsets_of(recorder_dumps const& dumps, recorded_wire const& wire) { return wire_numbers(dumps, wire).offsets(); }

}  // namespace plan_program
