#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/forward_part.hpp>
#include <chevron/schedule.hpp>

/// \file
/// Random plans that are right, and random changes to plans and programs that mostly make them wrong.

namespace chevron::tests {

/// Dice that give the same throws on every machine.
struct dice {
  std::mt19937 random;
  int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }
};

template <class Entry>
using lists = std::vector<std::vector<Entry>>;

inline lists<action> lists_of(plan_view const& p) {
  lists<action> out;
  for (int r = 0; r < p.size.ranks; ++r) out.emplace_back(p.actions + p.begin[r], p.actions + p.begin[r + 1]);
  return out;
}
inline lists<instruction> lists_of(program_view const& p) {
  lists<instruction> out;
  for (int r = 0; r < p.plan.size.ranks; ++r) out.emplace_back(p.instructions + p.begin[r], p.instructions + p.begin[r + 1]);
  return out;
}

template <class Entry>
void fill(lists<Entry> const& from, buffer<Entry>& entries, buffer<int>& begin) {
  std::size_t total = 0;
  for (auto const& one : from) total += one.size();
  entries = buffer<Entry>(static_cast<int>(total));
  begin = buffer<int>(static_cast<int>(from.size()) + 1, zeroed);
  int at = 0;
  for (std::size_t r = 0; r < from.size(); ++r) {
    for (Entry const& one : from[r]) entries.data[at++] = one;
    begin.data[r + 1] = at;
  }
}

/// A placement without system, but with a stage on every rank.
inline std::vector<int> any_placement(dice& d, int ranks) {
  int const stages = ranks + d.below(2 * ranks + 1);
  std::vector<int> rank_of;
  for (int s = 0; s < stages; ++s) rank_of.push_back(s < ranks ? s : d.below(ranks));
  std::shuffle(rank_of.begin(), rank_of.end(), d.random);
  return rank_of;
}
inline std::vector<int> known_placement(dice& d, int ranks) {
  int const across = 1 + d.below(4);
  bool const turns = d.one_in(2);
  std::vector<int> rank_of;
  for (int s = 0; s < ranks * across; ++s) {
    bool const back = turns && (s / ranks) % 2 == 1;
    rank_of.push_back(back ? ranks - 1 - s % ranks : s % ranks);
  }
  return rank_of;
}

/// Puts own actions between the others of each list, where their rows, drawn at random, allow them.
inline void with_own_actions(dice& d, plan& p, lists<action>& order) {
  for (int k = 0; k < own_kinds; ++k) {
    if (d.one_in(3)) continue;
    kind const own = static_cast<kind>(static_cast<int>(kind::own_x) + k);
    auto const among = [&](int most) { return static_cast<std::uint8_t>(d.below(1 << most) & 31); };
    own_kind& row = p.own[k];
    row = {.after = among(5), .before = among(5), .every = false, .declared = true};
    row.before = static_cast<std::uint8_t>(row.before & ~row.after);
    bool const every = d.one_in(3);
    bool all = true;
    for (int s = 0; s < p.stages; ++s) {
      for (int m = 0; m < p.size.units(); ++m) {
        auto& list = order[static_cast<std::size_t>(p.rank_of.data[s])];
        std::size_t first = 0, last = list.size();
        for (std::size_t i = 0; i < list.size(); ++i) {
          if (static_cast<int>(list[i].stage) != s || static_cast<int>(list[i].micro_batch) != m) continue;
          if ((row.after & kind_bit(list[i].kind)) != 0) first = i + 1;
          if ((row.before & kind_bit(list[i].kind)) != 0) last = std::min(last, i);
        }
        if (first > last || (!every && d.one_in(2))) {
          all = false;
          continue;
        }
        std::size_t at = first + static_cast<std::size_t>(d.below(static_cast<int>(last - first) + 1));
        if (at > 0 && list[at - 1].fused != 0) --at;  // nothing comes between the halves of a pair
        if (at < first) {
          all = false;
          continue;
        }
        list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), make_action(own, s, m));
      }
    }
    row.every = all && d.one_in(2);
  }
}

/// In one of four cases 2 or 3 slices. They take no throw: plans without slices stay those of their seeds.
inline int slices_without_a_throw(dice const& d) {
  std::mt19937 ahead = d.random;
  return ahead() % 4 == 0 ? 2 + static_cast<int>(ahead() % 2) : 1;
}

/// A lawful plan: a random placement, each chunk's backward whole or split at random, and a random order of all actions in
/// which each comes after the actions that it needs, cut into the ranks' lists. In half of the plans some neighbours that were
/// ready together are fused.
inline plan random_order(dice& d) {
  int const slices = slices_without_a_throw(d);
  int const ranks = 1 + d.below(5);
  int const micro_batches = (1 + d.below(slices > 1 ? 3 : 6)) * slices;  // or slices of them
  std::vector<int> const rank_of = d.one_in(3) ? any_placement(d, ranks) : known_placement(d, ranks);
  int const stages = static_cast<int>(rank_of.size());
  plan out;
  out.size = {ranks, micro_batches / slices, 0, slices};
  out.stages = stages;
  out.forward_only = d.one_in(12);
  out.rank_of = buffer<std::int16_t>(stages);
  for (int s = 0; s < stages; ++s) out.rank_of.data[s] = static_cast<std::int16_t>(rank_of[static_cast<std::size_t>(s)]);
  for (int r = 0; r < ranks; ++r)
    out.size.chunks = std::max(out.size.chunks, static_cast<int>(std::count(rank_of.begin(), rank_of.end(), r)));

  // How often each kind is drawn among the ready actions.
  int const temper[compute_kinds] = {1 + d.below(8), 1 + d.below(8), 1 + d.below(8), 1 + d.below(8), 1 + d.below(8)};
  int const recomputes = d.below(3);  // 0: nothing, 1: everything, 2: some chunks
  bool const pairs = d.one_in(2);
  int const splits = d.below(3);  // 0: none, 1: all, 2: some
  std::vector<action> ready;
  auto const becomes_ready = [&](action a) { ready.push_back(a); };
  auto const backward_of = [&](int s, int m) {
    bool const split = splits == 1 || (splits == 2 && d.one_in(2));
    return make_action(split ? kind::backward_input : kind::backward, s, m);
  };
  lists<action> order(static_cast<std::size_t>(ranks));
  // How much each cell's F and backward still wait for: F for the input and the carry of the slice before; a backward for
  // its forward, the gradient of the output, and the carry's gradient of the next slice.
  std::vector<int> forward_waits(static_cast<std::size_t>(stages * micro_batches)), backward_waits(forward_waits.size());
  auto const cell_of = [&](int s, int m) { return static_cast<std::size_t>(s * micro_batches + m); };
  for (int s = 0; s < stages; ++s) {
    for (int m = 0; m < micro_batches; ++m) {
      forward_waits[cell_of(s, m)] = (s > 0 ? 1 : 0) + (m % slices > 0 ? 1 : 0);
      backward_waits[cell_of(s, m)] = 2 + (m % slices + 1 < slices ? 1 : 0);
      if (forward_waits[cell_of(s, m)] == 0) becomes_ready(make_action(kind::forward, s, m));
    }
  }
  auto const forward_gets = [&](int s, int m) {
    if (--forward_waits[cell_of(s, m)] == 0) becomes_ready(make_action(kind::forward, s, m));
  };
  auto const backward_gets = [&](int s, int m) {
    if (--backward_waits[cell_of(s, m)] == 0) becomes_ready(backward_of(s, m));
  };
  auto const done = [&](action a) {
    int const s = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    if (a.kind == kind::forward) {
      if (s + 1 < stages) forward_gets(s + 1, m);
      if (m % slices + 1 < slices) forward_gets(s, m + 1);
      if (out.forward_only) return;
      if (s + 1 == stages) backward_gets(s, m);
      if (recomputes == 1 || (recomputes == 2 && d.one_in(2)))
        becomes_ready(make_action(kind::recompute, s, m));
      else
        backward_gets(s, m);
    } else if (a.kind == kind::recompute) {
      backward_gets(s, m);
    } else if (a.kind != kind::backward_weight) {
      if (a.kind == kind::backward_input) becomes_ready(make_action(kind::backward_weight, s, m));
      if (s > 0) backward_gets(s - 1, m);
      if (m % slices > 0) backward_gets(s, m - 1);
    }
  };
  while (!ready.empty()) {
    std::size_t pick = static_cast<std::size_t>(d.below(static_cast<int>(ready.size())));
    for (int tries = 0; tries < 3 && d.below(8) >= temper[static_cast<int>(ready[pick].kind)]; ++tries)
      pick = static_cast<std::size_t>(d.below(static_cast<int>(ready.size())));
    action first = ready[pick];
    int const rank = rank_of[first.stage];
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
    if (pairs && first.kind == kind::forward && d.one_in(2)) {
      auto const partner = std::find_if(ready.begin(), ready.end(), [&](action a) {
        return (a.kind == kind::backward || a.kind == kind::backward_input) && rank_of[a.stage] == rank;
      });
      if (partner != ready.end()) {
        action const second = *partner;
        ready.erase(partner);
        first.fused = 1;
        order[static_cast<std::size_t>(rank)].push_back(first);
        order[static_cast<std::size_t>(rank)].push_back(second);
        done(first);
        done(second);
        continue;
      }
    }
    order[static_cast<std::size_t>(rank)].push_back(first);
    done(first);
  }
  if (!out.forward_only && d.one_in(4)) with_own_actions(d, out, order);
  fill(order, out.actions, out.begin);
  return out;
}

inline plan from_catalogue(dice& d) {
  int const count = static_cast<int>(decltype(hana::size(catalogue::all))::value);
  shape const size{1 + d.below(5), 1 + d.below(8), 0};
  int const which = d.below(count);
  plan out;
  int index = 0;
  catalogue::for_each([&](auto const& one) {
    if (index++ == which) out = expand(one, size);
  });
  return out;
}

inline plan from_list(dice& d) {
  using namespace chevron::letters;
  int const slices = slices_without_a_throw(d);
  shape const size{1 + d.below(5), 1 + d.below(slices > 1 ? 3 : 6), 0, slices};
  bool const split = d.one_in(2);
  costs const times{.forward = 1.0 + d.below(3),
                    .backward_input = 1.0 + d.below(3),
                    .backward_weight = 1.0 + d.below(3),
                    .communication = d.below(2) * 0.5};
  auto const expanded = [&](auto const& where, int chunks) {
    auto base = schedule_of(split ? work_graph::split_backward : work_graph::full_backward).place(where).assuming(times);
    switch (d.below(4)) {
      case 0:
        base = base.prefer(F, I, W);
        break;
      case 1:
        base = base.prefer(W, I, F);
        break;
      case 2:
        base = base.prefer(I, W, F);
        break;
      default:
        break;
    }
    if (d.one_in(2)) return expand(base, size);
    return expand(base.at_most_in_flight(chunks * slices + d.below(2 * size.ranks)), size);
  };
  switch (d.below(4)) {
    case 0:
      return expanded(placement::linear, 1);
    case 1:
      return expanded(placement::loop, 2);
    case 2:
      return expanded(placement::vee, 2);
    default:
      return expanded(placement::wave<3>, 3);
  }
}

/// A lawful plan of any kind, sometimes with the least limit that it keeps, or forwards alone.
inline plan lawful_plan(dice& d) {
  plan out = d.below(10) < 6 ? random_order(d) : d.one_in(2) ? from_catalogue(d) : from_list(d);
  if (!out.forward_only && d.one_in(12)) out = forward_part(out);
  if (!out.forward_only && d.one_in(4)) out.in_flight_limit = peak_in_flight(out) + d.below(2);
  if (!out.forward_only && d.one_in(4)) {
    std::vector<std::int64_t> held, inputs;
    for (int stage = 0; stage < out.stages; ++stage) {
      held.push_back(d.below(5));
      inputs.push_back(d.below(static_cast<int>(held.back()) + 1));
    }
    size_view const sizes{held.data(), nullptr, 1, inputs.data(), 1};
    declare_bytes(out, std::max<std::int64_t>(1, peak_bytes(out, sizes)) + d.below(2), sizes);
  }
  if (d.one_in(4)) out.message_limit = std::max(1, messages(out) + d.below(2));
  return out;
}

/// The same without R and own actions.
inline plan lawful_plan_of_fbiw(dice& d) {
  for (;;) {
    plan out = lawful_plan(d);
    if (!out.view().has_own_kinds() && !out.view().holds(kind::recompute)) return out;
  }
}

/// One random change to the lists of ranks: delete, duplicate, swap, move on a rank or to another; `change` alters one entry.
template <class Entry, class Change>
void mutate(dice& d, lists<Entry>& of, Change change) {
  int const ranks = static_cast<int>(of.size());
  std::vector<Entry>* list = nullptr;
  do list = &of[static_cast<std::size_t>(d.below(ranks))];
  while (list->empty() && !d.one_in(50));
  if (list->empty()) return;
  auto const place = [&](std::vector<Entry>& in) { return in.begin() + d.below(static_cast<int>(in.size()) + 1); };
  std::size_t const at = static_cast<std::size_t>(d.below(static_cast<int>(list->size())));
  Entry const one = (*list)[at];
  auto const here = list->begin() + static_cast<std::ptrdiff_t>(at);
  switch (d.below(8)) {
    case 0:
      list->erase(here);
      break;
    case 1:
      list->insert(place(*list), one);
      break;
    case 2:
      std::swap((*list)[at], (*list)[static_cast<std::size_t>(d.below(static_cast<int>(list->size())))]);
      break;
    case 3:
      if (at + 1 < list->size()) std::swap((*list)[at], (*list)[at + 1]);
      break;
    case 4: {
      list->erase(here);
      auto& to = of[static_cast<std::size_t>(d.below(ranks))];
      to.insert(place(to), one);
      break;
    }
    case 5:
      list->erase(here);
      list->insert(place(*list), one);
      break;
    default:
      change((*list)[at]);
      break;
  }
}

/// Renumbers or re-stages an action, changes its kind, or makes and breaks pairs.
inline void renumber(dice& d, action& a, int stages, int micro_batches, int kinds) {
  switch (d.below(4)) {
    case 0:
      a.micro_batch = static_cast<std::uint32_t>(d.below(micro_batches + 1)) & 0xffffu;
      break;
    case 1:
      a.stage = static_cast<std::uint32_t>(d.below(stages + 1)) & 0x3ffu;
      break;
    case 2:
      a.kind = static_cast<kind>(d.below(kinds));
      break;
    default:
      a.fused = a.fused != 0 ? 0 : 1;
      break;
  }
}

inline plan mutant(dice& d, plan const& of) {
  plan out = of;
  lists<action> order = lists_of(out.view());
  for (int changes = 1 + d.below(2); changes > 0; --changes) {
    mutate(d, order,
           [&](action& a) { renumber(d, a, out.stages, out.size.units(), d.one_in(6) ? program_kinds : compute_kinds); });
  }
  if (out.in_flight_limit > 1 && d.one_in(4)) --out.in_flight_limit;
  if (out.byte_limit > 1 && d.one_in(4)) --out.byte_limit;
  if (out.message_limit > 1 && d.one_in(3)) --out.message_limit;
  if (d.one_in(20)) out.own[d.below(own_kinds)] = {.after = 1, .before = 0, .every = d.one_in(2), .declared = d.one_in(2)};
  if (d.one_in(20)) out.rank_of.data[d.below(out.stages)] = static_cast<std::int16_t>(d.below(out.size.ranks));
  fill(order, out.actions, out.begin);
  return out;
}

/// Waits for each send directly after it, on one rank or (-1) on all: lawful only if no rank then waits in a cycle.
inline void synchronous_sends(lists<instruction>& of, int on_rank) {
  for (std::size_t r = 0; r < of.size(); ++r) {
    if (on_rank >= 0 && static_cast<int>(r) != on_rank) continue;
    std::vector<instruction> out;
    for (instruction const& one : of[r]) {
      kind const what = one.op.kind;
      if (what == kind::wait_send_forward || what == kind::wait_send_backward) continue;
      out.push_back(one);
      if (what != kind::send_forward && what != kind::send_backward) continue;
      instruction wait = one;
      wait.op.kind = what == kind::send_forward ? kind::wait_send_forward : kind::wait_send_backward;
      wait.slot = no_slot;
      out.push_back(wait);
    }
    of[r] = out;
  }
}

/// Posts each receive right before the computation that reads it: wrong wherever sends have another order than their uses.
inline void deferred_receives(lists<instruction>& of, int on_rank) {
  for (std::size_t r = 0; r < of.size(); ++r) {
    if (on_rank >= 0 && static_cast<int>(r) != on_rank) continue;
    std::vector<instruction> out;
    for (instruction const& one : of[r]) {
      if (one.op.kind == kind::receive_forward || one.op.kind == kind::receive_backward) continue;
      for (instruction const& receive : of[r]) {
        bool const forward = receive.op.kind == kind::receive_forward && one.op.kind == kind::forward;
        bool const backward =
            receive.op.kind == kind::receive_backward && (one.op.kind == kind::backward || one.op.kind == kind::backward_input);
        bool const same = receive.op.stage == one.op.stage && receive.op.micro_batch == one.op.micro_batch;
        if ((forward || backward) && same) out.push_back(receive);
      }
      out.push_back(one);
    }
    of[r] = out;
  }
}

/// Moves some messages and waits later, by five places at most: lawful where no computation needs them earlier.
inline void later_messages(dice& d, lists<instruction>& of) {
  for (std::vector<instruction>& row : of) {
    for (int change = d.below(8); change > 0; --change) {
      int const size = static_cast<int>(row.size()), from = d.below(size), to = from + d.below(std::min(size - from, 6));
      kind const what = row[static_cast<std::size_t>(from)].op.kind;
      if (!is_send(what) && !is_receive(what) && !is_wait(what)) continue;
      std::rotate(row.begin() + from, row.begin() + from + 1, row.begin() + to + 1);
    }
  }
}

/// Posts each receive as late as its message allows: in the order in which the messages are sent if ranks take turns. So messages
/// that share channels meet no other message in between.
inline void receives_with_sends(lists<instruction>& of) {
  lists<instruction> out(of.size());
  std::vector<std::size_t> next(of.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < of.size(); ++r) {
      for (bool ran = false; next[r] < of[r].size(); ++next[r]) {
        instruction const one = of[r][next[r]];
        action const a = one.op;
        if (is_receive(a.kind)) {
          moved = true;
          continue;
        }
        auto const arrived = [&](instruction const& half) {
          if (half.source == no_slot || !is_compute(half.op.kind)) return true;
          kind const wanted = half.op.kind == kind::forward ? kind::receive_forward : kind::receive_backward;
          return std::any_of(out[r].begin(), out[r].end(), [&](instruction const& other) {
            return other.op == make_action(wanted, static_cast<int>(half.op.stage), static_cast<int>(half.op.micro_batch));
          });
        };
        if (!arrived(one) || (a.fused != 0 && !arrived(of[r][next[r] + 1]))) break;
        bool const second_half = next[r] > 0 && of[r][next[r] - 1].op.fused != 0;
        if (is_compute(a.kind) && !second_half && std::exchange(ran, true)) break;
        out[r].push_back(one);
        moved = true;
        if (!is_send(a.kind)) continue;
        std::size_t const to = static_cast<std::size_t>(one.peer);
        bool const forward = a.kind == kind::send_forward;
        action const wanted = make_action(forward ? kind::receive_forward : kind::receive_backward,
                                          static_cast<int>(a.stage) + (forward ? 1 : -1), static_cast<int>(a.micro_batch));
        out[to].push_back(
            *std::find_if(of[to].begin(), of[to].end(), [&](instruction const& other) { return other.op == wanted; }));
      }
    }
  }
  of = out;
}

/// Gives one tensor another slot, wherever it is named: lawful only if that slot is free all the time.
inline void move_tensor(dice& d, std::vector<instruction>& of, slot_counts const& there) {
  if (of.empty()) return;
  instruction const one = of[static_cast<std::size_t>(d.below(static_cast<int>(of.size())))];
  auto const any_of = [&](int count) { return static_cast<std::uint16_t>(d.below(count > 0 ? count : 1)); };
  bool const forward = one.op.kind == kind::send_forward || one.op.kind == kind::receive_forward;
  auto const same_chunk = [&](action a) { return a.stage == one.op.stage && a.micro_batch == one.op.micro_batch; };
  switch (one.op.kind) {
    case kind::receive_forward:
    case kind::receive_backward: {
      std::uint16_t const slot = any_of(there.receive);
      for (instruction& i : of) {
        bool const reads = is_compute(i.op.kind) && i.source != no_slot && (i.op.kind == kind::forward) == forward;
        if (same_chunk(i.op) && (i.op.kind == one.op.kind || reads)) i.source = slot;
      }
      break;
    }
    case kind::send_forward:
    case kind::send_backward: {
      std::uint16_t const slot = any_of(there.send);
      kind const wait = forward ? kind::wait_send_forward : kind::wait_send_backward;
      for (instruction& i : of) {
        if (same_chunk(i.op) && (i.op.kind == one.op.kind || i.op.kind == wait)) i.source = slot;
      }
      break;
    }
    case kind::forward: {
      std::uint16_t const slot = any_of(there.activation);
      for (instruction& i : of) {
        if (same_chunk(i.op) && i.slot != no_slot) i.slot = slot;
        bool const next = i.op.kind == kind::forward && i.op.stage == one.op.stage + 1;
        bool const previous =
            (i.op.kind == kind::backward || i.op.kind == kind::backward_input) && i.op.stage + 1 == one.op.stage;
        if (i.local != no_slot && i.op.micro_batch == one.op.micro_batch && (next || previous)) i.local = slot;
      }
      break;
    }
    default:
      break;
  }
}

inline owned_program mutant(dice& d, owned_program const& of) {
  owned_program out = of;
  int const ranks = out.source.size.ranks;
  lists<instruction> order = lists_of(out.view());
  auto const any_slot = [&](int there) { return d.one_in(8) ? no_slot : static_cast<std::uint16_t>(d.below(there + 1)); };
  for (int moves = d.one_in(3) ? 1 + d.below(3) : 0; moves > 0; --moves) {
    int const rank = d.below(ranks);
    move_tensor(d, order[static_cast<std::size_t>(rank)], out.slots.data[rank]);
  }
  if (d.one_in(8)) synchronous_sends(order, d.one_in(2) ? -1 : d.below(ranks));
  if (d.one_in(8)) deferred_receives(order, d.one_in(2) ? -1 : d.below(ranks));
  int most = 0;
  for (int r = 0; r < ranks; ++r) {
    slot_counts const& c = out.slots.data[r];
    most = std::max({most, c.activation, c.receive, c.send});
  }
  for (int changes = d.below(3); changes > 0; --changes) {
    mutate(d, order, [&](instruction& one) {
      switch (d.below(5)) {
        case 0:
          one.peer = static_cast<std::int16_t>(d.below(ranks + 2) - 1);
          break;
        case 1:
          one.slot = any_slot(most);
          break;
        case 2:
          one.source = any_slot(most);
          break;
        case 3:
          one.local = any_slot(most);
          break;
        default:
          renumber(d, one.op, out.source.stages, out.source.size.units(), program_kinds);
          break;
      }
    });
  }
  if (d.one_in(12)) {
    slot_counts& c = out.slots.data[d.below(ranks)];
    int& one = d.one_in(3) ? c.activation : d.one_in(2) ? c.receive : c.send;
    if (one > 0) --one;
  }
  fill(order, out.instructions, out.begin);
  return out;
}

inline std::string written(plan_view const& p) {
  std::string out = "P=" + std::to_string(p.size.ranks) + " M=" + std::to_string(p.size.micro_batches) +
                    " k=" + std::to_string(p.size.slices) + " limit " + std::to_string(p.in_flight_limit) + " chunks, " +
                    std::to_string(p.byte_limit) + " bytes, " + std::to_string(p.message_limit) + " messages" +
                    (p.forward_only ? " forward only" : "") + ", stages on ranks";
  for (int s = 0; s < p.stages; ++s) out += " " + std::to_string(p.rank_of[s]);
  for (int r = 0; r < p.size.ranks; ++r) {
    out += "\n  rank " + std::to_string(r) + ":";
    for (int i = 0; i < p.length(r); ++i) out += " " + to_text(p.at(r, i)).str() + (p.at(r, i).fused != 0 ? "+" : "");
  }
  return out;
}
inline std::string written(program_view const& p) {
  std::string out = written(p.plan);
  for (int r = 0; r < p.plan.size.ranks; ++r) {
    slot_counts const& c = p.slots[r];
    out += "\n  program of rank " + std::to_string(r) + " (" + std::to_string(c.activation) + " activation, " +
           std::to_string(c.receive) + " receive, " + std::to_string(c.send) + " send slots):";
    for (int i = 0; i < p.length(r); ++i) {
      instruction const& one = p.at(r, i);
      out += " " + to_text(one.op).str() + (one.op.fused != 0 ? "+" : "") + "[" + std::to_string(one.peer);
      for (std::uint16_t slot : {one.slot, one.source, one.local}) out += slot == no_slot ? "," : "," + std::to_string(slot);
      out += "]";
    }
  }
  return out;
}

}  // namespace chevron::tests
