#pragma once

#include <cstdint>
#include <span>

#include <chevron/lower/check_program.hpp>
#include <chevron/plan/step_graph.hpp>
#include "accelerator/stream_clocks.hpp"
#include "accelerator/stream_finding.hpp"
#include "accelerator/stream_order.hpp"

/// \file
/// The laws of the ranks' stream operations: nothing hangs, nothing is used before it is ready, no memory is written while a
/// stream may still read it. Proved from the lists alone, whatever the rules that made them: a list logged from a run is
/// checked like one of `stream_order`.
///
/// - Each channel carries the same messages in the same order at both ends, and every operation comes to its end.
/// - An event is recorded before it is waited for.
/// - A message is taken, sent, or handed on only after it was made; a receive goes into a slot only after the last use of the
///   slot's previous content, which for an input is its B or W.
/// - Computations that may be given the memory of a send slot, all after the host has let go of it, come after the send.
/// - A stage's gradients are added up one after another in the order of the host, summed after the last, and the step
///   comes after all sums.
/// - Steps follow one another: all work begins after the end of the step before on the compute stream, and has ended for the
///   compute stream at the end of its own step.
///
/// Two properties are not checked. All replicas enqueue their sums in the same order, so the sums meet. Memory that two lanes of
/// one rank pass to each other is kept by the caching allocator, which knows of streams (`record_stream`).

namespace chevron {

namespace detail {

/// The laws of one plan's lists, once the order of the operations is known.
struct stream_laws {
  stream_clocks const& order;
  plan_view const& plan = order.plan;
  int const cells = plan.stages * plan.size.units();
  buffer<int> forward{cells}, gradient{cells}, weight{cells};  // the operations that did it; -1: not yet. B is the last two
  buffer<int> added{plan.stages}, additions{plan.stages}, summed{plan.stages};
  // Of the rank under way. By slot, the RECV or SEND that is in there; by peer, the last SEND and the last RECV.
  buffer<int> received, sent, last_sent, last_received;
  buffer<int> let_go, seen;  // SENDs whose memory was let go of; how many of them each stream knows to have ended
  int gone = 0;

  constexpr explicit stream_laws(stream_clocks const& clocks) : order(clocks) {}

  constexpr stream_operation const& at(int i) const { return order.operations.data[i]; }
  constexpr bool before(int one, int other) const { return order.before(one, other); }
  static constexpr void empty(buffer<int>& of) {
    for (int& i : of) i = -1;
  }
  constexpr stream_finding late(law broken, int i, int other, char const* why) const {
    return order.found(broken, i, " does not wait for ", other, why);
  }
  constexpr stream_finding early(int i, action needed) const {
    return order.found(law::order, i, " comes before ", needed, ", which it needs");
  }
  constexpr stream_finding again(int i) const { return order.found(law::no_duplicate, i, " comes a second time"); }

  constexpr stream_finding check() {
    int slots = 0;
    for (stream_operation const& o : order.operations) slots = o.slot != no_slot && o.slot >= slots ? o.slot + 1 : slots;
    for (buffer<int>* of : {&received, &sent}) *of = buffer<int>(slots);
    for (buffer<int>* of : {&last_sent, &last_received}) *of = buffer<int>(order.ranks);
    let_go = buffer<int>(order.operations.count);
    for (buffer<int>* of : {&forward, &gradient, &weight, &added, &summed}) empty(*of);
    additions = buffer<int>(plan.stages, zeroed);
    for (int r = 0; r < order.ranks; ++r) {
      if (stream_finding const f = check_rank(r)) return f;
    }
    return {};
  }

  constexpr stream_finding check_rank(int r) {
    for (buffer<int>* of : {&received, &sent, &last_sent, &last_received}) empty(*of);
    seen = buffer<int>(order.streams, zeroed);
    gone = 0;
    int const begin = order.begin.data[r], end = order.begin.data[r + 1];
    for (int i = begin; i < end; ++i) {
      stream_operation const& o = at(i);
      if (o.does == stream_task::let_go) {
        int& held = sent.data[o.slot];
        if (held < 0) return order.found(law::slots, i, ", but nothing was sent from there");
        let_go.data[gone++] = held;
        held = -1;
      }
      if (o.does != stream_task::work) continue;
      if (!order.begins_with_step(i, r))
        return order.found(law::order, i,
                           " does not wait for the end of the step before: for nothing that its compute stream recorded");
      stream_finding const f = is_compute(o.op.kind)                 ? compute(i)
                               : is_send(o.op.kind)                  ? send(i)
                               : is_receive(o.op.kind)               ? receive(i)
                               : o.op.kind == kind::reduce_gradients ? sum(i)
                                                                     : step(i, r);
      if (f) return f;
    }
    for (int const left : sent) {
      if (left >= 0) return order.found(law::slots, left, " is never let go of");
    }
    for (int i = begin; i < end; ++i) {
      if (at(i).does == stream_task::work && !order.ends_with_step(i, r))
        return order.found(law::order, i, " may outlast the step: the compute stream does not wait for it");
    }
    return {};
  }

  /// Memory that the host has let go of may now belong to this computation.
  constexpr stream_finding allocate(int i) {
    for (int& k = seen.data[order.stream.data[i]]; k < gone; ++k) {
      if (!before(let_go.data[k], i)) return late(law::slots, i, let_go.data[k], ", whose memory has been let go of");
    }
    return {};
  }

  /// Checks a computation's input: the results of the previous stage, or of the next, from this rank or another.
  constexpr stream_finding take_input(int i) const {
    action const a = at(i).op;
    int const from = step_graph(plan).from(a);
    if (from < 0) return {};
    bool const goes_forward = a.kind == kind::forward;
    int const m = static_cast<int>(a.micro_batch);
    if (plan.rank_of[from] == plan.rank_of[a.stage]) {
      int const made = (goes_forward ? forward : gradient).data[from * plan.size.units() + m];
      if (made < 0) return early(i, make_action(goes_forward ? kind::forward : kind::backward, from, m));
      return before(made, i) ? stream_finding{} : late(law::order, i, made, ", whose results it takes");
    }
    int const message = received.data[at(i).slot];
    action const wanted = receive_for(a);
    if (message < 0 || !(at(message).op == wanted))
      return order.found(law::slots, i, " takes from a slot that does not hold ", wanted);
    return before(message, i) ? stream_finding{} : late(law::order, i, message, ", whose message it takes");
  }

  constexpr stream_finding compute(int i) {
    action const a = at(i).op;
    int const cell = order.cell_of(a);
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    bool const adds = a.kind == kind::backward || a.kind == kind::backward_weight;
    if (stream_finding const f = allocate(i)) return f;
    if (stream_finding const f = take_input(i)) return f;
    if (int const unit = step_graph(plan).carries_from(a); unit >= 0) {
      int const carried = (makes_output(a.kind) ? forward : gradient).data[stage * plan.size.units() + unit];
      if (carried < 0) return early(i, make_action(a.kind, stage, unit));
      if (!before(carried, i)) return late(law::order, i, carried, ", whose carry it takes");
    }
    int& made = (a.kind == kind::forward ? forward : a.kind == kind::backward_weight ? weight : gradient).data[cell];
    if (made >= 0) return again(i);
    made = i;
    if (a.kind != kind::forward) {
      bool const weights = a.kind == kind::backward_weight;
      int const first = (weights ? gradient : forward).data[cell];
      if (first < 0) return early(i, make_action(weights ? kind::backward_input : kind::forward, stage, m));
      if (!before(first, i)) return late(law::order, i, first, ", whose graph it walks");
    }
    if (adds) {
      weight.data[cell] = i;
      int& last = added.data[stage];
      if (summed.data[stage] >= 0) return order.found(law::order, i, " adds to what was handed to ", summed.data[stage]);
      if (last >= 0 && !before(last, i)) return late(law::order, i, last, ", which adds to the same gradients");
      last = i;
      ++additions.data[stage];
    }
    return {};
  }

  constexpr stream_finding send(int i) {
    stream_operation const& o = at(i);
    bool const goes_forward = o.op.kind == kind::send_forward;
    int const made = (goes_forward ? forward : gradient).data[order.cell_of(o.op)];
    if (made < 0)
      return early(i, make_action(goes_forward ? kind::forward : kind::backward, static_cast<int>(o.op.stage),
                                  static_cast<int>(o.op.micro_batch)));
    if (!before(made, i)) return late(law::order, i, made, ", whose results it sends");
    int& held = sent.data[o.slot];
    if (held >= 0) return order.found(law::slots, i, " takes the send slot of ", held, ", which has not been let go of");
    held = i;
    return in_turn(i, last_sent.data[o.peer]);
  }

  constexpr stream_finding receive(int i) {
    stream_operation const& o = at(i);
    int& held = received.data[o.slot];
    if (held >= 0) {
      int const cell = order.cell_of(at(held).op);
      bool const input = at(held).op.kind == kind::receive_forward;
      if ((plan.forward_only ? forward : weight).data[cell] < 0)
        return order.found(law::slots, i, " is received into the slot of a message that is still needed: ", held);
      for (int const use : {input ? forward.data[cell] : -1, gradient.data[cell], weight.data[cell]}) {
        if (use >= 0 && !before(use, i)) return late(law::slots, i, use, ", which uses what is in the slot");
      }
    }
    held = i;
    return in_turn(i, last_received.data[o.peer]);
  }

  /// On its channel a message comes after the one before it.
  constexpr stream_finding in_turn(int i, int& last) const {
    if (last >= 0 && !before(last, i)) return late(law::matched, i, last, ", which comes first on their channel");
    last = i;
    return {};
  }

  constexpr stream_finding sum(int i) {
    int const stage = static_cast<int>(at(i).op.stage);
    if (summed.data[stage] >= 0) return again(i);
    summed.data[stage] = i;
    if (additions.data[stage] < plan.size.units()) {
      int m = 0;
      while (weight.data[stage * plan.size.units() + m] >= 0) ++m;
      return early(i, make_action(kind::backward, stage, m));
    }
    int const last = added.data[stage];
    return before(last, i) ? stream_finding{} : late(law::order, i, last, ", which adds to these gradients");
  }

  constexpr stream_finding step(int i, int r) {
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] != r) continue;
      if (summed.data[s] < 0) return early(i, make_action(kind::reduce_gradients, s, 0));
      if (!before(summed.data[s], i)) return late(law::order, i, summed.data[s], ", whose sums it takes");
    }
    return allocate(i);
  }
};

}  // namespace detail

/// The first broken law of the stream operations of all ranks of a plan, or `law::none`. The plan has passed `check`.
/// \param lists one for each rank, in order
constexpr stream_finding check_streams(plan_view const& plan, std::span<std::span<stream_operation const> const> lists) {
  detail::stream_clocks order(plan, lists);
  if (stream_finding const f = order.lay_out()) return f;
  if (stream_finding const f = order.pair_up()) return f;
  if (stream_finding const f = order.play()) return f;
  return detail::stream_laws(order).check();
}

/// The same for the lists that `stream_order` gives.
constexpr stream_finding check_streams(program_view const& program) {
  int const ranks = program.plan.size.ranks;
  buffer<buffer<stream_operation>> lists(ranks);
  buffer<std::span<stream_operation const>> views(ranks);
  for (int r = 0; r < ranks; ++r) {
    lists.data[r] = stream_order(program, r);
    views.data[r] = {lists.data[r].data, static_cast<unsigned>(lists.data[r].count)};
  }
  return check_streams(program.plan, {views.data, static_cast<unsigned>(ranks)});
}

}  // namespace chevron
