#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/text_parts.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Finds ranks of a running job that wait for each other without end. (In a plan, before a run: prove/wait_cycle.hpp.)
///
/// The rule. Each rank counts, for every peer, messages sent to the peer and receives posted from the peer since the transport
/// was last opened; it also counts collective calls begun. A wait can end only after counts of certain ranks have reached a
/// number: to receive the third message from rank 2, rank 2 must have sent three messages to this rank. The counts of a waiting
/// rank do not change. So if every rank of a set waits, and each needs a count that another rank of the set has not reached, no
/// rank of the set ever continues (`stuck_ranks`). A rank whose needed counts are reached may continue, however long it waits:
/// its message is under way. A rank that computes does not wait.
///
/// Ranks of one process compare all waits under one lock, without these counts (threads_hub.hpp). Ranks in several processes
/// read waits from the job's store one after another, while ranks continue: `wait_looks` requires equal waits in three looks.

namespace chevron::detail {

/// The ranks that take part in a collective call with a rank, as a pattern of global ranks: those that are in the rank's block,
/// and at the rank's place in their period, where consecutive ranks may share a place. By default all ranks.
struct call_members {
  int block = 0;   ///< consecutive ranks within which members lie; 0: all ranks
  int period = 1;  ///< places repeat after as many ranks
  int run = 1;     ///< consecutive ranks that share a place

  bool operator==(call_members const&) const = default;

  /// The members of a group of ranks.
  static call_members of(rank_group among, topology const& grid) {
    int const replica = grid.ranks_of_replica(), world = grid.world();
    switch (among) {
      case rank_group::replicas:
        return {.period = replica};
      case rank_group::shards:
        return {.period = world, .run = grid.shards};
      case rank_group::experts:
        return {.block = replica * grid.expert_replicas, .period = replica, .run = grid.shards};
      default:
        return {.period = replica * grid.expert_replicas};
    }
  }
  /// Whether two global ranks take part in one call.
  bool together(int a, int b) const { return (block == 0 || a / block == b / block) && a % period / run == b % period / run; }
};

/// The count that other ranks must reach before a wait can end.
struct wait_need {
  enum class count : std::uint8_t {
    unknown,
    sent,
    received,
    gathers,
    early_gathers,
    texts,
    sums,
    shard_sums,
    expert_sums,
    copy_sums,
    ends
  };
  count of = count::unknown;  ///< which count; unknown: nobody can tell whether the wait can end
  unsigned turn = 0;          ///< for messages: number of the `open` call since which they are counted
  std::uint64_t least = 0;    ///< the number that the count must reach
  call_members members = {};  ///< of a collective call: the ranks that take part

  bool operator==(wait_need const&) const = default;
};

/// A rank's counts of messages and collective calls through one transport.
struct wait_progress {
  struct messages {
    std::vector<std::uint64_t> sent, received;  ///< numbers, indexed by the peer's global rank
    bool operator==(messages const&) const = default;
  };
  unsigned turn = 0;                         ///< number of the transport's `open` calls
  messages now, before;                      ///< messages since the last `open`, and in the turn before
  std::array<std::uint64_t, 11> begun = {};  ///< collective calls begun, indexed by `wait_need::count`

  std::uint64_t& operator[](wait_need::count of) { return begun[static_cast<std::size_t>(of)]; }
  std::uint64_t operator[](wait_need::count of) const { return begun[static_cast<std::size_t>(of)]; }
  /// The need of this rank's last collective call of a kind: other ranks must begin as many such calls.
  wait_need need_of(wait_need::count of) const { return {.of = of, .least = (*this)[of]}; }

  void resize(std::size_t world) {
    for (auto* one : {&now, &before}) {
      one->sent.assign(world, 0);
      one->received.assign(world, 0);
    }
  }
  void open() {
    ++turn;
    std::swap(now, before);
    std::fill(now.sent.begin(), now.sent.end(), 0);
    std::fill(now.received.begin(), now.received.end(), 0);
  }
  bool operator==(wait_progress const&) const = default;
};

/// Details of a wait that other ranks read. The data behind the pointers must not change before the wait ends.
struct wait_details {
  wait_need need{};
  wait_progress const* done = nullptr;
  std::string const* transport = nullptr;
};

/// A rank's wait and counts, in the form that other ranks read.
struct wait_entry {
  long tick = 0;           ///< number of writes: unchanged if the rank has stopped, or waits no more
  std::uint64_t wait = 0;  ///< number of the wait among its rank's waits
  int peer = -1;           ///< global rank; -1 for a collective
  std::string words;       ///< the action: `1RECV_F0`
  std::string text;        ///< the wait in words: `step 4, 1RECV_F0 from rank 2`
  std::string transport;   ///< key prefix of the transport
  wait_need need;
  wait_progress done;

  bool is_send() const { return words.find("SEND") != std::string::npos; }
};

/// Builds the entry of a rank's wait. \param wait number of the wait among its rank's waits
inline wait_entry entry_of(std::uint64_t wait, awaited const& mine, wait_details const& details) {
  wait_entry out;
  out.wait = wait;
  out.peer = mine.peer;
  out.words = mine.action_text();
  out.text = mine.text();
  out.need = details.need;
  if (details.done != nullptr) out.done = *details.done;
  if (details.transport != nullptr) out.transport = *details.transport;
  return out;
}

/// Calls `see(field)` for each field of a wait, in the order of `to_line`.
template <class Entry, class See>
void for_each_field(Entry& e, See const& see) {
  for (auto* text : {&e.words, &e.text, &e.transport}) see(*text);
  see(e.tick);
  see(e.wait);
  see(e.peer);
  see(e.need.of);
  see(e.need.turn);
  see(e.need.least);
  for (auto* number : {&e.need.members.block, &e.need.members.period, &e.need.members.run}) see(*number);
  see(e.done.turn);
  for (auto& each : e.done.begun) see(each);
  for (auto* messages : {&e.done.now, &e.done.before}) {
    see(messages->sent);
    see(messages->received);
  }
}

inline std::string to_line(wait_entry const& e) {
  std::vector<std::string> fields;
  for_each_field(e, [&]<class Field>(Field const& field) {
    if constexpr (std::is_same_v<Field, std::string>) {
      fields.push_back(field);
    } else if constexpr (std::is_same_v<Field, std::vector<std::uint64_t>>) {
      std::string& out = fields.emplace_back();
      for (auto const each : field) out += (out.empty() ? "" : ",") + std::to_string(each);
    } else {
      fields.push_back(std::to_string(static_cast<long>(field)));
    }
  });
  std::string out = fields[0];
  for (std::size_t i = 1; i < fields.size(); ++i) out += field_separator + fields[i];
  return out;
}

/// Reads a wait from a line by `to_line`. \returns nullopt if the line is no wait
inline std::optional<wait_entry> wait_of(std::string const& line) {
  auto const fields = fields_of(line);
  std::size_t next = 0;
  wait_entry out;
  for_each_field(out, [&]<class Field>(Field& field) {
    if (next++ >= fields.size()) return;
    std::string const& text = fields[next - 1];
    if constexpr (std::is_same_v<Field, std::string>) {
      field = text;
    } else if constexpr (std::is_same_v<Field, std::vector<std::uint64_t>>) {
      for (std::string const& each : parts_of(text, ',')) field.push_back(static_cast<std::uint64_t>(number_of(each)));
    } else {
      field = static_cast<Field>(number_of(text));
    }
  });
  bool const fits =
      next == fields.size() && out.need.of <= wait_need::count::ends && out.need.members.period > 0 && out.need.members.run > 0;
  return fits ? std::optional(out) : std::nullopt;
}

/// Whether a waiting rank needs a count that another rank has not reached yet.
/// \param waiting,rank the waiting rank's wait and number \param other,other_rank the other rank's wait and number
inline bool lacks(wait_entry const& waiting, int rank, wait_entry const& other, int other_rank) {
  using count = wait_need::count;
  wait_need const& need = waiting.need;
  if (rank == other_rank || need.of == count::unknown || waiting.transport != other.transport) return false;
  if (need.of == count::sent || need.of == count::received) {
    if (other_rank != waiting.peer) return false;
    // A rank that is one turn ahead may have sent the message in the turn before; a rank further ahead has sent it.
    if (other.done.turn > need.turn + 1) return false;
    if (other.done.turn < need.turn) return true;
    auto const& turn = other.done.turn == need.turn ? other.done.now : other.done.before;
    auto const& counts = need.of == count::sent ? turn.sent : turn.received;
    return static_cast<std::size_t>(rank) < counts.size() && counts[static_cast<std::size_t>(rank)] < need.least;
  }
  if (!need.members.together(rank, other_rank)) return false;
  // Both ranks are in their collective with this number, under different names: they made different calls.
  if (other.need == need && other.words != waiting.words) return true;
  return other.done[need.of] < need.least;
}

/// Returns the ranks whose waits can never end; empty if there are none.
/// \param waits at one time, by rank; nullopt for a rank that does not wait
inline std::vector<int> stuck_ranks(std::vector<std::optional<wait_entry>> const& waits) {
  std::vector<int> stuck;
  for (std::size_t r = 0; r < waits.size(); ++r) {
    if (waits[r]) stuck.push_back(static_cast<int>(r));
  }
  auto const at = [&](int r) -> wait_entry const& { return *waits[static_cast<std::size_t>(r)]; };
  for (;;) {
    std::vector<int> const before = stuck;
    std::erase_if(stuck, [&](int r) {
      return std::none_of(before.begin(), before.end(), [&](int other) { return lacks(at(r), r, at(other), other); });
    });
    if (stuck.size() == before.size()) return stuck;
  }
}

/// The reason text of a failure in which ranks wait for each other. Groups ranks with equal waits.
/// \param waits ranks, each with the text of its wait
inline std::string wait_for_each_other(std::vector<std::pair<int, std::string>> const& waits) {
  std::vector<std::pair<std::string, std::string>> groups;  // ranks, and their wait
  std::size_t const most = 8;
  for (auto const& [rank, text] : waits) {
    auto const same = std::find_if(groups.begin(), groups.end(), [&](auto const& g) { return g.second == text; });
    if (same != groups.end()) {
      same->first += ", " + std::to_string(rank);
    } else {
      groups.emplace_back("rank " + std::to_string(rank), text);
    }
  }
  std::string out = "the ranks wait for each other, and none can go on: ";
  for (std::size_t g = 0; g < groups.size() && g < most; ++g) {
    out += (g == 0 ? "" : "; ") + groups[g].first + (g == 0 ? " waiting in " : " in ") + groups[g].second;
  }
  if (groups.size() > most) out += "; …";
  out += ". Remedy: every rank makes the same calls, in the same order";
  auto const within_stage = [](auto const& group) {
    return group.second.find("over experts") != std::string::npos || group.second.find("over shards") != std::string::npos;
  };
  if (std::any_of(groups.begin(), groups.end(), within_stage))
    out += "; the ranks of an expert group, and the shards of a stage, take the same branches in every forward";
  return out;
}

/// The failure to publish for stuck ranks. If stuck ranks wait for the end of the job, blames the first such rank.
inline failure failure_of_stuck(std::vector<int> const& stuck, std::vector<std::optional<wait_entry>> const& waits) {
  std::vector<std::pair<int, std::string>> texts;
  failure out{.code = static_cast<int>(exit_code::preflight)};
  for (int const r : stuck) {
    wait_entry const& one = *waits[static_cast<std::size_t>(r)];
    texts.emplace_back(r, one.text);
    out.ranks.insert(out.ranks.end(), {r, one.peer});
    if (one.need.of != wait_need::count::ends || out.rank >= 0) continue;
    out.code = static_cast<int>(exit_code::peer_lost);
    out.rank = r;
  }
  out.reason = wait_for_each_other(texts);
  if (out.rank >= 0) out.reason = "rank " + std::to_string(out.rank) + " has ended: " + out.reason;
  return out;
}

/// Confirms waits that are read from the store one after another, while ranks continue. A rank found in the same wait by three
/// looks in a row, each time with a new tick, was in that wait from the end of the first look to the begin of the second; so
/// all such ranks waited at the same time.
class wait_looks {
 public:
  /// \param now last written wait, by rank; nullopt for a rank that has written none
  /// \returns the waits found by this look and the two looks before
  std::vector<std::optional<wait_entry>> look(std::vector<std::optional<wait_entry>> now) {
    std::vector<std::optional<wait_entry>> sure(now.size());
    seen_.resize(now.size());
    for (std::size_t r = 0; r < now.size(); ++r) {
      bool const goes_on =
          now[r] && last_.size() > r && last_[r] && last_[r]->wait == now[r]->wait && last_[r]->tick != now[r]->tick;
      seen_[r] = goes_on ? seen_[r] + 1 : 0;
      if (seen_[r] >= 2) sure[r] = now[r];
    }
    last_ = std::move(now);
    return sure;
  }
  void forget() {
    last_.clear();
    seen_.clear();
  }

 private:
  std::vector<std::optional<wait_entry>> last_;
  std::vector<int> seen_;
};

}  // namespace chevron::detail
