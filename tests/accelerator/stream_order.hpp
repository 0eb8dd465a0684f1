#pragma once

#include <cstdint>

#include <chevron/lower/program.hpp>

/// \file
/// The stream operations of a rank that runs its program: one list, in the order in which its host enqueues them. The host never
/// waits in the list. The same list can be logged from a run; check_streams.hpp proves both.

namespace chevron {

enum class stream_kind : std::uint8_t {
  compute,  ///< lane 0: whatever has no reason to be elsewhere
  side,     ///< lane 1: one half of a fused pair, and the backward of what ran forward there
  sums,     ///< sums of gradients over replicas
  send,     ///< to one peer
  receive   ///< from one peer
};

/// A stream of a rank: `compute`, `side`, `sums`, `to 1`, `from 1`.
struct stream_name {
  stream_kind kind;
  std::int16_t peer = no_peer;  ///< of send and receive
  friend constexpr bool operator==(stream_name, stream_name) = default;
};

constexpr void append(text& out, stream_name s) {
  constexpr char const* names[] = {"compute", "side", "sums", "to ", "from "};
  out.append(static_cast<int>(s.kind) < 5 ? names[static_cast<int>(s.kind)] : "?");
  if (s.kind == stream_kind::send || s.kind == stream_kind::receive) out.append(static_cast<int>(s.peer));
}

enum class event_kind : std::uint8_t {
  computed,       ///< the compute stream has come as far as the host had issued
  side_computed,  ///< the side stream has
  arrived,        ///< by receive slot: its message is there
  sent,           ///< by send slot: its tensors have been read
  summed          ///< by stage: its gradients are the sum over replicas
};

/// An event. Recorded anew, it is another point: a wait means the last record before it in the order of the host.
struct event_name {
  event_kind kind;
  std::uint16_t number = 0;  ///< of arrived, sent and summed
  friend constexpr bool operator==(event_name, event_name) = default;
};

constexpr void append(text& out, event_name e) {
  constexpr char const* names[] = {"computed", "side computed", "arrived ", "sent ", "summed "};
  out.append(static_cast<int>(e.kind) < 5 ? names[static_cast<int>(e.kind)] : "?");
  if (e.kind >= event_kind::arrived) out.append(static_cast<int>(e.number));
}

enum class stream_task : std::uint8_t {
  record,  ///< an event of this stream
  wait,    ///< this stream goes on after the event
  work,    ///< an action: a computation, SEND, RECV, REDUCE_GRAD or OPTIMIZER_STEP
  let_go   ///< the host gives the memory of a send slot back; who is asked to compute later may get it
};

/// One operation. Which fields count depends on the task; the others are as `recording`, `waiting`, `working` and `letting_go`
/// leave them, so that equal operations compare equal.
struct stream_operation {
  stream_name on;
  stream_task does;
  event_name event;    ///< record, wait
  action op;           ///< work
  std::int16_t peer;   ///< SEND and RECV: the other rank; with it, the channel, whatever the stream is
  std::uint16_t slot;  ///< SEND, let_go: send slot. RECV, and F, B, I that take a message: receive slot
  friend constexpr bool operator==(stream_operation const&, stream_operation const&) = default;
};

constexpr stream_operation recording(event_name event, stream_name on) {
  return {on, stream_task::record, event, {}, no_peer, no_slot};
}
constexpr stream_operation waiting(event_name event, stream_name on) {
  return {on, stream_task::wait, event, {}, no_peer, no_slot};
}
constexpr stream_operation working(action what, stream_name on, std::uint16_t slot = no_slot, std::int16_t peer = no_peer) {
  return {on, stream_task::work, {event_kind::computed}, what, peer, slot};
}
constexpr stream_operation letting_go(std::uint16_t send_slot) {
  return {{stream_kind::compute}, stream_task::let_go, {event_kind::computed}, {}, no_peer, send_slot};
}

/// `[from 0] 1RECV_F0 into 2`, `[compute] wait for arrived 2`, `[host] let go of 1`.
constexpr void append(text& out, stream_operation const& o) {
  out.append('[');
  if (o.does == stream_task::let_go)
    out.append("host");
  else
    append(out, o.on);
  out.append("] ");
  switch (o.does) {
    case stream_task::record:
      out.append("record ");
      append(out, o.event);
      break;
    case stream_task::wait:
      out.append("wait for ");
      append(out, o.event);
      break;
    case stream_task::work: {
      append(out, o.op);
      bool const receives = o.op.kind == kind::receive_forward || o.op.kind == kind::receive_backward;
      if (o.slot != no_slot) out.append(receives ? " into " : " from ").append(static_cast<int>(o.slot));
      break;
    }
    case stream_task::let_go:
      out.append("let go of ").append(static_cast<int>(o.slot));
      break;
  }
}

namespace detail {

/// The list under construction.
struct stream_writer {
  stream_operation* out;
  int count = 0;

  constexpr void add(stream_operation const& o) { out[count++] = o; }
  /// Orders all later work of stream `later` after all earlier work of stream `earlier`.
  constexpr void follow(stream_name later, stream_name earlier, event_name event) {
    add(recording(event, earlier));
    add(waiting(event, later));
  }
  /// Work of another stream: behind all that was asked to be computed, and with an event of its own.
  constexpr void aside(stream_operation const& work, event_name done) {
    follow(work.on, {stream_kind::compute}, {event_kind::computed});
    add(work);
    add(recording(done, work.on));
  }
};

}  // namespace detail

/// The operations of one rank. They follow the program, instruction by instruction:
///
/// - RECV: the stream from that peer goes behind all that was computed so far, and so behind the last use of the slot; it
///   receives, and records `arrived`.
/// - F, B, I that take a message: the compute stream waits for its `arrived` first, wherever they run.
/// - F runs on the compute stream, unless it is half of a fused pair: then on the lane on which the other half does not run. B, I
///   and W run on the lane of their F, as autograd has it.
/// - Work on the side stream, a pair or one action, begins after all earlier work of the compute stream, and later work of the
///   compute stream begins after it.
/// - SEND: the stream to that peer goes behind all that was computed so far; it sends, and records `sent`.
/// - WAIT_SEND: the compute stream waits for `sent`; then the host lets go of the tensors.
/// - REDUCE_GRAD: the stream of sums goes behind all that was computed so far; it sums, and records `summed`.
/// - UNSHARD waits for the step before, which the list does not hold: no operation.
/// - OPTIMIZER_STEP: the compute stream waits for `summed` of each stage, and steps.
constexpr buffer<stream_operation> stream_order(program_view const& program, int rank) {
  plan_view const& plan = program.plan;
  constexpr stream_name compute{stream_kind::compute}, side{stream_kind::side};
  int const length = program.length(rank);
  // No instruction gives more than six operations, but a step waits for every stage.
  buffer<stream_operation> list(6 * length + plan.stages);
  detail::stream_writer write{list.data};
  buffer<std::uint8_t> lane_memory(plan.stages * plan.size.units());  // that a chunk's F ran on
  std::uint8_t* const lane = lane_memory.data;
  auto const cell = [&](action a) { return static_cast<int>(a.stage) * plan.size.units() + static_cast<int>(a.micro_batch); };
  auto const take_message = [&](instruction const& one) {
    if (one.source != no_slot) write.add(waiting({event_kind::arrived, one.source}, compute));
  };
  auto const run = [&](instruction const& one) {
    write.add(working(one.op, lane[cell(one.op)] == 0 ? compute : side, one.source));
  };
  for (int i = 0; i < length; ++i) {
    instruction const& one = program.at(rank, i);
    action const a = one.op;
    switch (a.kind) {
      case kind::receive_forward:
      case kind::receive_backward:
        write.aside(working(a, {stream_kind::receive, one.peer}, one.source, one.peer), {event_kind::arrived, one.source});
        break;
      case kind::send_forward:
      case kind::send_backward:
        write.aside(working(a, {stream_kind::send, one.peer}, one.source, one.peer), {event_kind::sent, one.source});
        break;
      case kind::wait_send_forward:
      case kind::wait_send_backward:
        write.add(waiting({event_kind::sent, one.source}, compute));
        write.add(letting_go(one.source));
        break;
      case kind::reduce_gradients:
        write.aside(working(a, {stream_kind::sums}), {event_kind::summed, static_cast<std::uint16_t>(a.stage)});
        break;
      case kind::unshard:
        break;
      case kind::optimizer_step:
        for (int s = 0; s < plan.stages; ++s) {
          if (plan.rank_of[s] == rank) write.add(waiting({event_kind::summed, static_cast<std::uint16_t>(s)}, compute));
        }
        write.add(working(a, compute));
        break;
      default: {
        // Not a null pointer where there is no pair: under -fsanitize=undefined GCC takes no address beside nullptr for a constant.
        bool const pair = a.fused != 0;
        instruction const* const other = &program.at(rank, pair ? ++i : i);  // a pair's second half
        if (a.kind == kind::forward) lane[cell(a)] = pair && lane[cell(other->op)] == 0 ? std::uint8_t{1} : std::uint8_t{0};
        bool const forks = pair || lane[cell(a)] != 0;
        take_message(one);
        if (pair) take_message(*other);
        if (forks) write.follow(side, compute, {event_kind::computed});
        run(one);
        if (pair) run(*other);
        if (forks) write.follow(compute, side, {event_kind::side_computed});
        break;
      }
    }
  }
  list.count = write.count;
  return list;
}

}  // namespace chevron
