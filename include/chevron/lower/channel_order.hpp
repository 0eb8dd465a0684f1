#pragma once

#include <cstdint>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/channels.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/sizes.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/wait_cycle.hpp>

/// \file
/// Plays a program's messages over channels that messages share, as communicators of NCCL: finds ranks that wait for each other
/// since a message stands behind another one on its channel.

namespace chevron {

namespace detail {

/// Plays a program whose messages match (`check_messages`, or `check` of a program). A rank enqueues its messages in the order
/// of its list. A computation waits for the end of its receive, a WAIT_SEND for the end of its send; at the end of its list a
/// rank waits for all of its messages.
class channel_player {
 public:
  constexpr channel_player(program_view const& program, channel_rules rules, size_view sizes, std::int64_t buffered_below)
      : program_(program),
        rules_(rules),
        graph_(program.plan),
        sizes_(sizes),
        buffered_below_(buffered_below),
        queues_(rules.model == channel_model::edge   ? 2 * program.plan.size.ranks
                : rules.model == channel_model::pair ? program.plan.size.ranks
                                                     : 1),
        rank_of_(program.total()),
        state_(program.total(), zeroed),
        batch_(program.total()),
        behind_(program.total(), zeroed),
        sends_(graph_.results(), zeroed),
        receives_(graph_.results(), zeroed),
        first_(program.plan.size.ranks * queues_, zeroed),
        last_(program.plan.size.ranks * queues_, zeroed),
        posted_(program.plan.size.ranks * queues_, zeroed),
        open_(program.plan.size.ranks * queues_, zeroed),
        next_(program.plan.size.ranks),
        enqueued_(program.plan.size.ranks),
        met_(program.total()),
        awake_(program.plan.size.ranks),
        listed_(program.plan.size.ranks, zeroed) {
    for (int r = 0; r < program.plan.size.ranks; ++r) {
      next_.data[r] = enqueued_.data[r] = program.begin[r];
      int first = -1;  // of the batch that a message at `i` joins; -1: none
      for (int i = program.begin[r]; i < program.begin[r + 1]; ++i) {
        action const a = program.instructions[i].op;
        rank_of_.data[i] = r;
        if (ends_batch(i)) first = -1;
        if (is_message(i) && (first < 0 || rules.model != channel_model::batched)) first = i;
        batch_.data[i] = first;
        if (is_send(a.kind)) sends_.data[graph_.makes(a)] = i + 1;
        if (is_receive(a.kind)) receives_.data[graph_.needs(a)] = i + 1;
      }
    }
  }

  /// Runs the program. \returns the cycle of messages that wait for each other; none if every rank reaches its end
  constexpr finding play() {
    int const ranks = program_.plan.size.ranks;
    for (int r = ranks - 1; r >= 0; --r) wake(r);
    while (awake_count_ > 0) {
      int const rank = awake_.data[--awake_count_];
      listed_.data[rank] = false;
      advance(rank);
      while (met_count_ > 0) meet(met_.data[--met_count_]);
    }
    for (int i = 0; i < program_.total(); ++i) {
      if (is_message(i) && state_.data[i] != done) return cycle_from(i);
    }
    return {};
  }

 private:
  enum : std::uint8_t { away, enqueued, posted, done };  // of a message

  constexpr action at(int i) const { return program_.instructions[i].op; }
  constexpr bool is_message(int i) const { return is_send(at(i).kind) || is_receive(at(i).kind); }
  constexpr bool ends_batch(int i) const { return is_compute(at(i).kind) || is_wait(at(i).kind); }
  constexpr int queue_of(int i) const {
    int const base = rank_of_.data[i] * queues_;
    int const peer = program_.instructions[i].peer;
    if (rules_.model == channel_model::edge) return base + 2 * peer + (is_send(at(i).kind) ? 1 : 0);
    return rules_.model == channel_model::pair ? base + peer : base;
  }
  /// The same message on the other rank: a send's receive, a receive's send.
  constexpr int partner_of(int i) const {
    action const a = at(i);
    return (is_send(a.kind) ? receives_.data[graph_.makes(a)] : sends_.data[graph_.needs(a)]) - 1;
  }
  constexpr bool buffered(int send) const {
    if (buffered_below_ <= 0 || sizes_.message == nullptr) return false;
    action const a = at(send);
    int const boundary = static_cast<int>(a.stage) - (a.kind == kind::send_forward ? 0 : 1);
    return sizes_.message_of(boundary) < buffered_below_;
  }
  constexpr void wake(int rank) {
    if (listed_.data[rank]) return;
    listed_.data[rank] = true;
    awake_.data[awake_count_++] = rank;
  }

  /// The message for whose end an instruction waits; -1: none.
  constexpr int awaited_by(int i) const {
    action const a = at(i);
    if (is_wait(a.kind)) return sends_.data[graph_.makes(a)] - 1;
    if (is_compute(a.kind) && graph_.comes_over(a) >= 0) return receives_.data[graph_.needs(a)] - 1;
    return rules_.hosts_wait && is_message(i) ? i : -1;
  }

  /// Runs a rank's instructions up to the first that waits.
  constexpr void advance(int rank) {
    int const end = program_.begin[rank + 1];
    for (int& i = next_.data[rank]; i < end; ++i) {
      if (is_message(i) && i >= enqueued_.data[rank]) {
        int& to = enqueued_.data[rank];
        for (to = i; to < end && !ends_batch(to) && (!is_message(to) || batch_.data[to] == batch_.data[i]); ++to) {
          if (is_message(to)) enqueue(to);
        }
        for (int j = i; j < to; ++j) {
          if (is_message(j)) post(queue_of(j));
        }
      }
      if (int const message = awaited_by(i); message >= 0 && state_.data[message] != done) return;
    }
  }
  constexpr void enqueue(int i) {
    int const queue = queue_of(i);
    (last_.data[queue] == 0 ? first_.data[queue] : behind_.data[last_.data[queue] - 1]) = i + 1;
    last_.data[queue] = i + 1;
    state_.data[i] = enqueued;
  }
  /// Posts the next message, or batch, of a channel whose posted messages have ended.
  constexpr void post(int queue) {
    if (open_.data[queue] > 0) return;
    int const before = posted_.data[queue];
    int const next = before == 0 ? first_.data[queue] : behind_.data[before - 1];
    for (int i = next; i != 0 && batch_.data[i - 1] == batch_.data[next - 1]; i = behind_.data[i - 1]) {
      state_.data[i - 1] = posted;
      posted_.data[queue] = i;
      ++open_.data[queue];
      met_.data[met_count_++] = i - 1;
    }
  }
  /// Ends a posted message whose other end is posted, too, and a buffered send at once.
  constexpr void meet(int i) {
    if (state_.data[i] != posted) return;
    int const other = partner_of(i);
    bool const sends = is_send(at(i).kind);
    bool const both = state_.data[other] == posted;
    if (both || (sends ? buffered(i) : state_.data[other] == done)) end(i);
    if (both) end(other);
  }
  constexpr void end(int i) {
    if (state_.data[i] == done) return;
    state_.data[i] = done;
    int const queue = queue_of(i);
    if (--open_.data[queue] == 0) post(queue);
    wake(rank_of_.data[i]);
  }

  /// A message in front of its channel on which a message depends: itself if it is posted, else a posted message of its rank.
  struct front {
    int message = -1;
    int held = -1;  ///< a message that stands behind `message` on their channel; -1: only the rank's own order is in the way
  };
  constexpr front front_of(int i) const {
    if (state_.data[i] == away) i = awaited_by(next_.data[rank_of_.data[i]]);
    if (state_.data[i] == posted) return {i, -1};
    int const queue = queue_of(i);
    int ahead = first_.data[queue] - 1;
    while (state_.data[ahead] != posted) ahead = behind_.data[ahead] - 1;
    return {ahead, i};
  }

  constexpr finding cycle_from(int stuck) const {
    int const total = program_.total();
    auto const waits_for = [&](int i) { return front_of(partner_of(i)).message; };
    wait_cycle const cycle = cycle_of_waits(front_of(stuck).message, total, waits_for, [&](int i) { return rank_of_.data[i]; });
    int const second = waits_for(cycle.first);
    finding f{.broken = law::deadlock,
              .rank = rank_of_.data[cycle.first],
              .position = cycle.first - program_.begin[rank_of_.data[cycle.first]],
              .what = at(cycle.first),
              .other = at(partner_of(cycle.first)),
              .other_rank = rank_of_.data[second],
              .behind = at(second),
              .then = at(partner_of(second)),
              .last_behind = at(partner_of(cycle.last)),
              .links = cycle.links,
              .slices = program_.plan.size.slices};
    f.channels = rules_;
    int i = cycle.first;
    for (int link = 0; link < cycle.links && f.channel_rank < 0; ++link) {
      front const ahead = front_of(partner_of(i));
      i = ahead.message;
      if (ahead.held < 0) continue;
      f.channel_rank = rank_of_.data[i];
      f.channel_peer = program_.instructions[i].peer;
      f.held = at(ahead.held);
      f.holder = at(i);
    }
    return f;
  }

  program_view program_;
  channel_rules rules_;
  step_graph graph_;
  size_view sizes_;
  std::int64_t buffered_below_;
  int queues_;                    // of a rank
  buffer<int> rank_of_;           // by instruction
  buffer<std::uint8_t> state_;    // by instruction
  buffer<int> batch_;             // by message: the first of its batch
  buffer<int> behind_;            // by instruction: the next on its channel, 1-based; 0: none
  buffer<int> sends_, receives_;  // by result: its messages, 1-based; 0: none
  buffer<int> first_, last_;      // by queue: of all messages enqueued so far, 1-based; 0: none
  buffer<int> posted_, open_;     // by queue: the last message posted, 1-based; the number of those that have not ended
  buffer<int> next_, enqueued_;   // by rank: the first instruction not run, and the first message not enqueued
  buffer<int> met_;               // messages posted, each to be met with its other end
  int met_count_ = 0;
  buffer<int> awake_;  // ranks to run
  int awake_count_ = 0;
  buffer<bool> listed_;  // by rank: whether it is in `awake_`
};

}  // namespace detail

/// Plays a program's messages over channels: no rank waits for ever if this returns no finding. Linear in the number of
/// instructions.
/// \param program a program whose messages match one to one: it has passed `check`, or is a file's and has passed
///                `check_messages`
/// \param rules how many messages share a channel, and whether hosts wait
/// \param sizes bytes of the messages of each boundary; none: all sends last until their receives
/// \param buffered_below sends of fewer bytes end without their receives, as soon as they are in front of their channel
/// \returns the cycle of messages, with the channel that closes it
constexpr finding check_channel_order(program_view const& program, channel_rules rules, size_view sizes = {},
                                      std::int64_t buffered_below = 0) {
  return detail::channel_player(program, rules, sizes, buffered_below).play();
}

}  // namespace chevron
