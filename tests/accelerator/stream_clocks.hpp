#pragma once

#include <span>

#include <chevron/lower/check_program.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/wait_cycle.hpp>
#include "accelerator/stream_finding.hpp"
#include "accelerator/stream_order.hpp"

/// \file
/// The order that is certain among the stream operations of all ranks; and whether all operations run.

namespace chevron {

namespace detail {

/// The lists of all ranks, rank after rank, as one.
///
/// A stream does its operations in order; a wait goes on after the record it means; the k-th SEND of a channel (a directed pair
/// of ranks) and its k-th RECV are a rendezvous: neither ends before both have begun. Hosts never wait. The order is
/// the least one that contains these rules (Lamport 1978). It is found by playing the lists, with a clock for each operation:
/// how many operations of each stream, of all ranks, have ended when it begins. O(operations × streams).
struct stream_clocks {
  plan_view const& plan;
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.units();
  buffer<stream_operation> operations;
  buffer<int> begin;         // rank r has operations [begin[r], begin[r + 1])
  int streams = 0;           // stream r is the compute stream of rank r
  buffer<int> stream;        // of each operation
  buffer<int> tick;          // of each operation: how many came before it on its stream; on compute the step before is one, too
  buffer<int> head, next;    // each stream's operations still to come, as a chain
  buffer<int> partner;       // the record of a wait, the RECV of a SEND, the SEND of a RECV; else -1
  buffer<int> clock, ended;  // ended operations by stream: when an operation begins; known to a stream so far

  constexpr stream_clocks(plan_view const& of_plan, std::span<std::span<stream_operation const> const> lists)
      : plan(of_plan), begin(of_plan.size.ranks + 1) {
    int total = 0;
    for (int r = 0; r < ranks; ++r) {
      begin.data[r] = total;
      total += static_cast<int>(lists[static_cast<unsigned>(r)].size());
    }
    begin.data[ranks] = total;
    operations = buffer<stream_operation>(total);
    stream_operation* out = operations.data;
    for (int r = 0; r < ranks; ++r) {
      for (stream_operation const& o : lists[static_cast<unsigned>(r)]) *out++ = o;
    }
    for (buffer<int>* of : {&stream, &tick, &next, &partner}) *of = buffer<int>(total);
  }

  constexpr int cell_of(action a) const { return static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch); }
  constexpr stream_place place_of(int i) const {
    int r = 0;
    while (begin.data[r + 1] <= i) ++r;
    return {r, i - begin.data[r], operations.data[i]};
  }
  constexpr stream_finding found(law broken, int i, char const* words) const {
    stream_finding f;
    f.broken = broken;
    f.at = place_of(i);
    f.words = words;
    return f;
  }
  constexpr stream_finding found(law broken, int i, char const* words, action needed, char const* more = "") const {
    stream_finding f = found(broken, i, words);
    f.names_needed = true;
    f.needed = needed;
    f.more = more;
    return f;
  }
  constexpr stream_finding found(law broken, int i, char const* words, int other, char const* more = "") const {
    stream_finding f = found(broken, i, words);
    f.other = place_of(other);
    f.more = more;
    return f;
  }

  constexpr bool is_peer(int peer, int rank) const { return peer >= 0 && peer < ranks && peer != rank; }

  constexpr bool makes_sense(stream_operation const& o, int rank) const {
    if (o.does == stream_task::let_go) return o.slot != no_slot;
    bool const edge = o.on.kind == stream_kind::send || o.on.kind == stream_kind::receive;
    if (o.on.kind > stream_kind::receive || (edge && !is_peer(o.on.peer, rank))) return false;
    if (o.does == stream_task::record || o.does == stream_task::wait) return o.event.kind <= event_kind::summed;
    action const a = o.op;
    if (o.does != stream_task::work || static_cast<int>(a.kind) >= program_kinds || is_wait(a.kind)) return false;
    if (a.kind == kind::optimizer_step) return true;
    if (static_cast<int>(a.stage) >= plan.stages || plan.rank_of[a.stage] != rank) return false;
    if (is_of_stage(a.kind)) return true;
    if (static_cast<int>(a.micro_batch) >= micro_batches) return false;
    if (is_compute(a.kind)) {
      int const from = step_graph(plan).from(a);
      return from < 0 || plan.rank_of[from] == rank || o.slot != no_slot;
    }
    int const there = step_graph(plan).other_end(a);
    return there >= 0 && is_peer(o.peer, rank) && plan.rank_of[there] == o.peer && o.slot != no_slot;
  }

  /// Numbers the streams, and gives each its operations.
  constexpr stream_finding lay_out() {
    int const kinds = 3 + 2 * ranks;
    buffer<int> number(ranks * kinds, zeroed), last(ranks * kinds);
    head = buffer<int>(ranks * kinds);
    streams = ranks;
    for (int r = 0; r < ranks; ++r) head.data[r] = -1;
    for (int r = 0; r < ranks; ++r) {
      for (int i = begin.data[r]; i < begin.data[r + 1]; ++i) {
        stream_operation const& o = operations.data[i];
        partner.data[i] = stream.data[i] = -1;
        if (!makes_sense(o, r))
          return found(law::ids_in_range, i,
                       " names a stream, event, peer, slot, stage or microbatch that this rank does not have");
        if (o.does == stream_task::let_go) continue;
        int const which = o.on.kind < stream_kind::send    ? static_cast<int>(o.on.kind)
                          : o.on.kind == stream_kind::send ? 3 + o.on.peer
                                                           : 3 + ranks + o.on.peer;
        int& known = number.data[r * kinds + which];
        if (which != 0 && known == 0) head.data[streams] = -1, known = streams++;
        int const s = which == 0 ? r : known;
        stream.data[i] = s;
        next.data[i] = -1;
        tick.data[i] = head.data[s] < 0 ? (which == 0 ? 1 : 0) : tick.data[last.data[s]] + 1;
        (head.data[s] < 0 ? head.data[s] : next.data[last.data[s]]) = i;
        last.data[s] = i;
      }
    }
    return {};
  }

  /// Finds the record that each wait means, and the other end of each message.
  constexpr stream_finding pair_up() {
    int numbers = 1;
    for (stream_operation const& o : operations) numbers = o.event.number >= numbers ? o.event.number + 1 : numbers;
    buffer<int> first(ranks * ranks), chain(operations.count);  // each channel's RECVs not yet met
    for (int& f : first) f = -1;
    for (int r = ranks - 1; r >= 0; --r) {
      buffer<int> recorded(5 * numbers);
      for (int& e : recorded) e = -1;
      for (int i = begin.data[r]; i < begin.data[r + 1]; ++i) {
        stream_operation const& o = operations.data[i];
        if (o.does != stream_task::record && o.does != stream_task::wait) continue;
        int& record = recorded.data[static_cast<int>(o.event.kind) * numbers + o.event.number];
        if (o.does == stream_task::record) record = i;
        if (o.does == stream_task::wait && record < 0) return found(law::order, i, ", an event that has not been recorded");
        if (o.does == stream_task::wait) partner.data[i] = record;
      }
      for (int i = begin.data[r + 1] - 1; i >= begin.data[r]; --i) {
        stream_operation const& o = operations.data[i];
        if (o.does != stream_task::work || !is_receive(o.op.kind)) continue;
        int& channel = first.data[o.peer * ranks + r];
        chain.data[i] = channel;
        channel = i;
      }
    }
    for (int r = 0; r < ranks; ++r) {
      for (int i = begin.data[r]; i < begin.data[r + 1]; ++i) {
        stream_operation const& o = operations.data[i];
        if (o.does != stream_task::work || !is_send(o.op.kind)) continue;
        int& channel = first.data[r * ranks + o.peer];
        action const wanted = receive_of(o.op);
        if (channel < 0) return found(law::matched, i, " is never received: no rank posts ", wanted);
        if (!(operations.data[channel].op == wanted))
          return found(law::matched, channel, " is posted where this channel delivers ", wanted);
        partner.data[i] = channel;
        partner.data[channel] = i;
        channel = chain.data[channel];
      }
    }
    for (int const left : first) {
      if (left >= 0) return found(law::matched, left, " is never sent: there is no ", send_of(operations.data[left].op));
    }
    return {};
  }

  /// Plays all operations, and stores a clock for the begin of each.
  constexpr stream_finding play() {
    clock = buffer<int>(operations.count * streams);
    ended = buffer<int>(streams * streams, zeroed);
    for (int r = 0; r < ranks; ++r) ended.data[r * streams + r] = 1;
    auto const begins = [&](int i) {
      int const* const now = ended.data + stream.data[i] * streams;
      for (int s = 0; s < streams; ++s) clock.data[i * streams + s] = now[s];
    };
    auto const learns = [&](int s, int const* from) {
      int* const now = ended.data + s * streams;
      for (int t = 0; t < streams; ++t) now[t] = from[t] > now[t] ? from[t] : now[t];
    };
    auto const ends = [&](int i) {
      int const s = stream.data[i];
      ended.data[s * streams + s] = tick.data[i] + 1;
      head.data[s] = next.data[i];
    };
    for (bool moved = true; moved;) {
      moved = false;
      for (int s = 0; s < streams; ++s) {
        for (int i = head.data[s]; i >= 0; i = head.data[s], moved = true) {
          int const other = partner.data[i];
          int const there = other < 0 ? s : stream.data[other];
          if (other >= 0 && operations.data[i].does == stream_task::wait) {
            if (ended.data[there * streams + there] <= tick.data[other]) break;
            begins(i);
            learns(s, clock.data + other * streams);
            int& known = ended.data[s * streams + there];
            known = tick.data[other] + 1 > known ? tick.data[other] + 1 : known;
          } else {
            if (other >= 0 && head.data[there] != other) break;
            begins(i);
            if (other >= 0) {
              begins(other);
              learns(s, clock.data + other * streams);
              learns(there, clock.data + i * streams);
              ends(other);
            }
          }
          ends(i);
        }
      }
    }
    for (int s = 0; s < streams; ++s) {
      if (head.data[s] >= 0) return deadlock(s);
    }
    return {};
  }

  /// Each stuck stream waits for an operation behind the next operation of a stuck stream, so the chain ends in a cycle.
  constexpr stream_finding deadlock(int stuck) const {
    auto const waits_for = [&](int s) { return stream.data[partner.data[head.data[s]]]; };
    wait_cycle const cycle = cycle_of_waits(stuck, streams, waits_for, [&](int s) { return head.data[s]; });
    int const first = cycle.first;
    stream_finding f = found(law::deadlock, head.data[first], " waits for ", partner.data[head.data[first]]);
    f.links = cycle.links;
    int at = first;
    for (stream_link* link : {&f.next, &f.after_next}) {
      at = waits_for(at);
      *link = {place_of(head.data[at]), place_of(partner.data[head.data[at]])};
    }
    return f;
  }

  /// Whether one operation has ended when another begins, however it goes.
  constexpr bool before(int one, int other) const { return clock.data[other * streams + stream.data[one]] > tick.data[one]; }
  /// Whether an operation of this rank begins after the end of the step before.
  constexpr bool begins_with_step(int i, int rank) const { return clock.data[i * streams + rank] > 0; }
  /// Whether it has ended for the compute stream when that has done all of this step.
  constexpr bool ends_with_step(int i, int rank) const { return ended.data[rank * streams + stream.data[i]] > tick.data[i]; }
};

}  // namespace detail
}  // namespace chevron
