#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// The meaning of plans and programs, written a second time and as plainly as possible, to check the prover. Shares no code and
/// no approach with prove/ and lower/: a plan is a graph whose nodes become done one after another, a program a machine
/// whose slots and channels hold values. Slow, and made for small sizes.

namespace chevron::tests {

/// Which laws a plan breaks, by an exhaustive look at it: `1 << law`; 0: lawful. Deadlock is only looked for in plans that
/// are otherwise sound.
inline unsigned broken_laws(plan_view const& plan) {
  int const ranks = plan.size.ranks, stages = plan.stages, slices = plan.size.slices;
  int const micro_batches = plan.size.micro_batches * slices;  // or slices of them
  auto const bit = [](law l) { return 1u << static_cast<int>(l); };
  unsigned broken = 0;
  std::set<int> inhabited;
  for (int s = 0; s < stages; ++s) inhabited.insert(plan.rank_of_stage(s));
  if (static_cast<int>(inhabited.size()) != ranks || *inhabited.begin() != 0 || *inhabited.rbegin() != ranks - 1)
    return bit(law::placement);

  // Where each piece of work stands, in its rank's list.
  using piece = std::tuple<kind, int, int>;
  std::map<piece, std::vector<int>> stands;
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < plan.length(r); ++i) {
      action const a = plan.at(r, i);
      int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
      bool const computes = a.kind == kind::forward || a.kind == kind::backward || a.kind == kind::backward_input ||
                            a.kind == kind::backward_weight || a.kind == kind::recompute || a.kind == kind::own_x ||
                            a.kind == kind::own_y || a.kind == kind::own_z;
      bool const own = a.kind == kind::own_x || a.kind == kind::own_y || a.kind == kind::own_z;
      if (own && computes && !plan.own[static_cast<int>(a.kind) - static_cast<int>(kind::own_x)].declared)
        broken |= bit(law::ids_in_range);
      else if (!computes || stage >= stages || m >= micro_batches || plan.rank_of_stage(stage) != r)
        broken |= bit(law::ids_in_range);
      else
        stands[{a.kind, stage, m}].push_back(i);
    }
  }
  auto const count = [&](kind k, int s, int m) {
    auto const at = stands.find({k, s, m});
    return at == stands.end() ? 0 : static_cast<int>(at->second.size());
  };
  auto const before = [&](kind first, kind second, int s, int m) {
    for (int a : stands[{first, s, m}]) {
      for (int b : stands[{second, s, m}]) {
        if (a > b) broken |= bit(law::order);
      }
    }
  };
  for (int s = 0; s < stages; ++s) {
    for (int m = 0; m < micro_batches; ++m) {
      int const f = count(kind::forward, s, m), b = count(kind::backward, s, m), i = count(kind::backward_input, s, m),
                w = count(kind::backward_weight, s, m), again = count(kind::recompute, s, m);
      bool const gradients_twice = b > 0 && i + w > 0;
      if (f > 1 || b > 1 || i > 1 || w > 1 || again > 1 || gradients_twice || (plan.forward_only && b + i + w + again > 0))
        broken |= bit(law::no_duplicate);
      if (f == 0 || (!plan.forward_only && b == 0 && (i == 0 || w == 0))) broken |= bit(law::complete);
      before(kind::forward, kind::backward, s, m);
      before(kind::forward, kind::backward_input, s, m);
      before(kind::backward_input, kind::backward_weight, s, m);
      before(kind::forward, kind::recompute, s, m);
      before(kind::recompute, kind::backward, s, m);
      before(kind::recompute, kind::backward_input, s, m);
      for (kind const own : {kind::own_x, kind::own_y, kind::own_z}) {
        own_kind const& row = plan.own[own == kind::own_x ? 0 : own == kind::own_y ? 1 : 2];
        int const there = count(own, s, m);
        if (there > 1 || (plan.forward_only && there > 0)) broken |= bit(law::no_duplicate);
        if (there == 0 && row.every && row.declared && !plan.forward_only) broken |= bit(law::complete);
        for (int k = 0; k < 8; ++k) {
          if ((row.after >> k & 1) != 0) before(static_cast<kind>(k), own, s, m);
          if ((row.before >> k & 1) != 0) before(own, static_cast<kind>(k), s, m);
        }
      }
      if (w > 0 && i == 0 && b == 0) broken |= bit(law::complete);
      // A slice's F reads the carry of the slice before; its B or I the carry's gradient, of the slice behind.
      auto const places = [&](std::vector<kind> const& kinds, int unit) {
        std::vector<int> out;
        for (kind const k : kinds) out.insert(out.end(), stands[{k, s, unit}].begin(), stands[{k, s, unit}].end());
        return out;
      };
      auto const in_order = [&](std::vector<kind> const& kinds, int first, int second) {
        for (int const x : places(kinds, first)) {
          for (int const y : places(kinds, second)) {
            if (x > y) broken |= bit(law::order);
          }
        }
      };
      if (m % slices != 0) {
        in_order({kind::forward}, m - 1, m);
        in_order({kind::backward, kind::backward_input}, m, m - 1);
      }
    }
  }
  for (int r = 0; r < ranks && !plan.forward_only; ++r) {
    std::multiset<std::pair<int, int>> in_flight;
    std::set<std::pair<int, int>> inputs_only;
    for (int i = 0; i < plan.length(r); ++i) {
      action const a = plan.at(r, i);
      std::pair<int, int> const chunk{static_cast<int>(a.stage), static_cast<int>(a.micro_batch)};
      if (a.kind == kind::forward) {
        in_flight.insert(chunk);
        for (int j = i + 1; j < plan.length(r); ++j) {
          action const later = plan.at(r, j);
          if (later.kind == kind::recompute && later.stage == a.stage && later.micro_batch == a.micro_batch)
            inputs_only.insert(chunk);
        }
      }
      if (a.kind == kind::recompute) inputs_only.erase(chunk);
      if (a.kind == kind::backward || a.kind == kind::backward_weight) in_flight.erase(chunk);
      if (plan.in_flight_limit > 0 && static_cast<int>(in_flight.size()) > plan.in_flight_limit) broken |= bit(law::in_flight);
      std::int64_t bytes = 0;
      for (auto const& [stage, m] : in_flight) {
        if (plan.byte_limit <= 0 || stage >= stages) continue;
        bool const inputs = inputs_only.count({stage, m}) > 0;
        bytes += inputs && plan.input_bytes[stage] > 0 ? plan.input_bytes[stage] : plan.stage_bytes[stage];
      }
      if (bytes > plan.byte_limit) broken |= bit(law::bytes);
    }
  }
  int crossings = 0;
  for (int s = 1; s < stages; ++s) crossings += plan.rank_of_stage(s) == plan.rank_of_stage(s - 1) ? 0 : 1;
  int const messages = crossings * micro_batches + (plan.forward_only ? 0 : crossings * micro_batches);
  if (plan.message_limit > 0 && messages > plan.message_limit) broken |= bit(law::messages);
  // A pair: an F, and right behind it the B or I of another chunk.
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < plan.length(r); ++i) {
      action const a = plan.at(r, i);
      if (a.fused == 0) continue;
      bool const last = i + 1 == plan.length(r);
      action const b = last ? action{} : plan.at(r, i + 1);
      bool const halves = a.kind == kind::forward && (b.kind == kind::backward || b.kind == kind::backward_input);
      if (last || !halves || (a.stage == b.stage && a.micro_batch == b.micro_batch)) broken |= bit(law::fused_pair);
    }
  }
  if ((broken & ~(bit(law::in_flight) | bit(law::bytes) | bit(law::messages))) != 0) return broken;

  // A graph: each node, an action or a fused pair, needs its predecessor in the list and the results that it takes. Repeats
  // passes until a pass changes nothing.
  std::set<piece> made;
  std::vector<int> reached(static_cast<std::size_t>(ranks));
  auto const is_made = [&](kind k, int s, int m) { return made.count({k, s, m}) > 0; };
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = ranks - 1; r >= 0; --r) {
      int& at = reached[static_cast<std::size_t>(r)];
      if (at == plan.length(r)) continue;
      std::vector<action> node{plan.at(r, at)};
      if (node[0].fused != 0) node.push_back(plan.at(r, at + 1));
      bool ready = true;
      for (action const a : node) {
        int const s = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
        if (a.kind == kind::forward) ready = ready && (s == 0 || is_made(kind::forward, s - 1, m));
        if (a.kind == kind::backward || a.kind == kind::backward_input)
          ready = ready && (s == stages - 1 || is_made(kind::backward, s + 1, m) || is_made(kind::backward_input, s + 1, m));
      }
      if (!ready) continue;
      for (action const a : node) made.insert({a.kind, static_cast<int>(a.stage), static_cast<int>(a.micro_batch)});
      at += static_cast<int>(node.size());
      moved = true;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    if (reached[static_cast<std::size_t>(r)] != plan.length(r)) broken |= bit(law::deadlock);
  }
  return broken;
}

/// A machine that runs a program: every slot holds a value with its stage and microbatch, every directed edge is one queue
/// without tags, a transfer happens when its send and its receive are both posted and all earlier ones of the edge have
/// happened. Ranks take turns at random.
class machine {
 public:
  explicit machine(program_view const& program) : program_(program), plan_(program.plan) {}

  /// Why the program is wrong; empty: it is right.
  std::string run(std::mt19937& random) {
    ranks_.clear();
    edges_.clear();
    added_.clear();
    int const ranks = plan_.size.ranks;
    for (int r = 0; r < ranks; ++r) {
      slot_counts const counts = program_.slots[r];
      rank fresh;
      fresh.activations.resize(static_cast<std::size_t>(counts.activation));
      fresh.buffers.resize(static_cast<std::size_t>(counts.receive));
      fresh.sends.resize(static_cast<std::size_t>(counts.send));
      ranks_.push_back(fresh);
    }
    std::vector<int> running;
    for (int r = 0; r < ranks; ++r) running.push_back(r);
    // A rank that is blocked sits out until anybody else has moved.
    std::vector<int> asleep;
    while (!running.empty()) {
      std::size_t const pick = random() % running.size();
      int const r = running[pick];
      rank& mine = ranks_[static_cast<std::size_t>(r)];
      if (mine.at == program_.length(r)) {
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(pick));
        continue;
      }
      instruction const& one = program_.at(r, mine.at);
      int taken = 1;
      outcome const result = one.op.fused != 0 ? pair(r, mine, taken) : step(r, mine, one);
      if (!result.fault.empty())
        return "rank " + std::to_string(r) + ", step " + std::to_string(mine.at) + ", " + to_text(one.op).str() + ": " +
               result.fault;
      if (result.blocked) {
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(pick));
        asleep.push_back(r);
        continue;
      }
      mine.at += taken;
      running.insert(running.end(), asleep.begin(), asleep.end());
      asleep.clear();
    }
    if (!asleep.empty()) return "ranks wait for ever";
    return left_behind();
  }

 private:
  /// A tensor: the output of a stage for a microbatch, or the gradient of a stage's input.
  struct value {
    bool gradient;
    int stage;
    int micro_batch;
    bool operator==(value const&) const = default;
  };
  struct cell {
    int stage;
    int micro_batch;
    bool operator==(cell const&) const = default;
  };
  struct activation {
    std::optional<cell> graph;
    bool input_gradient_done = false, recomputed = false;
    std::optional<value> outputs, input_gradients;
  };
  struct buffer {
    bool pending = false;
    std::optional<value> content;
    std::optional<cell> user;  // whose graph was built on this memory
  };
  struct transfer {
    bool complete = false;
    action label{};
    int peer = -1;
  };
  struct posted_send {
    std::size_t slot;
    value content;
  };
  struct posted_receive {
    std::size_t slot;
    value expected;
  };
  struct edge {
    std::deque<posted_send> sends;
    std::deque<posted_receive> receives;
  };
  struct rank {
    int at = 0;
    std::vector<activation> activations;
    std::vector<buffer> buffers;
    std::vector<std::optional<transfer>> sends;
    std::vector<action> computed;
    std::set<int> summed, whole;
    bool stepped = false;
  };
  struct outcome {
    bool blocked = false;
    std::string fault{};
  };

  static outcome wrong(std::string why) { return {false, std::move(why)}; }

  bool lives_here(action a, int r) const {
    return static_cast<int>(a.stage) < plan_.stages && static_cast<int>(a.micro_batch) < plan_.size.units() &&
           plan_.rank_of_stage(static_cast<int>(a.stage)) == r;
  }

  outcome step(int r, rank& mine, instruction const& one) {
    action const a = one.op;
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    switch (a.kind) {
      case kind::forward:
      case kind::backward:
      case kind::backward_input:
      case kind::backward_weight:
      case kind::recompute:
      case kind::own_x:
      case kind::own_y:
      case kind::own_z:
        if (!plan_.forward_only && mine.whole.count(stage) == 0) return wrong("its parameters are not whole");
        return compute(r, mine, one);
      case kind::send_forward:
        return send(r, mine, one, {false, stage, m});
      case kind::send_backward:
        return send(r, mine, one, {true, stage, m});
      case kind::receive_forward:
        return receive(r, mine, one, {false, stage - 1, m});
      case kind::receive_backward:
        return receive(r, mine, one, {true, stage + 1, m});
      case kind::wait_send_forward:
      case kind::wait_send_backward: {
        if (one.source >= mine.sends.size()) return wrong("no such send slot");
        std::optional<transfer>& in = mine.sends[one.source];
        kind const sent = a.kind == kind::wait_send_forward ? kind::send_forward : kind::send_backward;
        if (!in || !(in->label == make_action(sent, stage, m)) || in->peer != one.peer) return wrong("waits for no such send");
        if (!in->complete) return {true};
        in.reset();
        return {};
      }
      case kind::reduce_gradients:
        if (plan_.forward_only) return wrong("nothing to sum");
        if (stage >= plan_.stages || plan_.rank_of_stage(stage) != r) return wrong("not this rank's stage");
        if (added_[stage] != plan_.size.units()) return wrong("summed before all gradients are there");
        if (!mine.summed.insert(stage).second) return wrong("summed twice");
        return {};
      case kind::unshard:
        if (plan_.forward_only) return wrong("no optimizer cuts parameters");
        if (stage >= plan_.stages || plan_.rank_of_stage(stage) != r) return wrong("not this rank's stage");
        if (!mine.whole.insert(stage).second) return wrong("unsharded twice");
        return {};
      case kind::optimizer_step:
        if (plan_.forward_only || mine.stepped) return wrong("no step to make");
        for (int s = 0; s < plan_.stages; ++s) {
          if (plan_.rank_of_stage(s) == r && mine.summed.count(s) == 0) return wrong("steps before the sums");
        }
        mine.stepped = true;
        return {};
    }
    return wrong("no instruction");
  }

  /// A fused pair: one action in time, so both halves must be able to start.
  outcome pair(int r, rank& mine, int& taken) {
    instruction const& first = program_.at(r, mine.at);
    if (first.op.kind != kind::forward || mine.at + 1 == program_.length(r)) return wrong("half a pair");
    instruction const& second = program_.at(r, mine.at + 1);
    if (second.op.kind != kind::backward && second.op.kind != kind::backward_input) return wrong("half a pair");
    for (instruction const* half : {&first, &second}) {
      if (mine.whole.count(static_cast<int>(half->op.stage)) == 0) return wrong("its parameters are not whole");
      if (half->source < mine.buffers.size() && mine.buffers[half->source].pending) return {true};
    }
    taken = 2;
    outcome const result = compute(r, mine, first);
    return result.blocked || !result.fault.empty() ? result : compute(r, mine, second);
  }

  outcome compute(int r, rank& mine, instruction const& one) {
    action const a = one.op;
    if (!lives_here(a, r)) return wrong("not this rank's work");
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    cell const here{stage, m};
    if (a.kind == kind::own_x || a.kind == kind::own_y || a.kind == kind::own_z) {
      mine.computed.push_back(a);
      return {};
    }
    if (one.slot >= mine.activations.size()) return wrong("no such activation slot");
    bool const forward = a.kind == kind::forward;
    if (!forward) {
      activation const& slot = mine.activations[one.slot];
      if (slot.graph != here) return wrong("its graph is not there");
      if (slot.input_gradient_done != (a.kind == kind::backward_weight))
        return wrong("its input gradient comes once, before its W");
    }
    if (a.kind == kind::recompute) {
      if (std::exchange(mine.activations[one.slot].recomputed, true)) return wrong("recomputed twice");
      mine.computed.push_back(a);
      return {};
    }

    // Its input: where from, and is it the right one?
    if (a.kind != kind::backward_weight) {
      int const from = forward ? stage - 1 : stage + 1;
      bool const given = from < 0 || from == plan_.stages;
      bool const local = !given && plan_.rank_of_stage(from) == r;
      value const wanted{!forward, from, m};
      if (local != (one.local != no_slot) || (!given && !local) != (one.source != no_slot)) return wrong("input from elsewhere");
      if (local) {
        if (one.local >= mine.activations.size()) return wrong("no such activation slot to read");
        activation& source = mine.activations[one.local];
        std::optional<value>& content = forward ? source.outputs : source.input_gradients;
        if (content != wanted) return wrong("the neighbour's result is not there");
        content.reset();
      } else if (!given) {
        if (one.source >= mine.buffers.size()) return wrong("no such receive slot");
        buffer& source = mine.buffers[one.source];
        if (source.pending) return {true};
        if (source.content != wanted) return wrong("what was received is something else");
        if (source.user) return wrong("what was received is in use");
        if (!plan_.forward_only) source.user = here;
        if (plan_.forward_only) source.content.reset();
      }
    }

    activation& slot = mine.activations[one.slot];
    if (forward) {
      if (slot.graph || slot.outputs || slot.input_gradients) return wrong("overwrites what is still needed");
      if (!plan_.forward_only) slot.graph = here;
      slot.input_gradient_done = slot.recomputed = false;
      if (stage + 1 < plan_.stages) slot.outputs = value{false, stage, m};
    } else if (a.kind != kind::backward_weight) {
      slot.input_gradient_done = true;
      if (stage > 0) slot.input_gradients = value{true, stage, m};
    }
    if (a.kind == kind::backward || a.kind == kind::backward_weight) {
      slot.graph.reset();
      ++added_[stage];
      for (buffer& b : mine.buffers) {
        if (b.user == here) b = {};
      }
    }
    mine.computed.push_back(a);
    return {};
  }

  outcome send(int r, rank& mine, instruction const& one, value const& what) {
    if (one.slot >= mine.activations.size() || one.source >= mine.sends.size()) return wrong("no such slot");
    if (one.peer < 0 || one.peer >= plan_.size.ranks || one.peer == r) return wrong("no such peer");
    activation& slot = mine.activations[one.slot];
    std::optional<value>& content = what.gradient ? slot.input_gradients : slot.outputs;
    if (content != what) return wrong("what it sends is not there");
    if (mine.sends[one.source]) return wrong("an unfinished send is in its slot");
    content.reset();
    mine.sends[one.source] = transfer{false, one.op, one.peer};
    edges_[{r, one.peer}].sends.push_back({one.source, what});
    return exchange(r, one.peer);
  }

  outcome receive(int r, rank& mine, instruction const& one, value const& what) {
    if (one.source >= mine.buffers.size()) return wrong("no such slot");
    if (one.peer < 0 || one.peer >= plan_.size.ranks || one.peer == r) return wrong("no such peer");
    buffer& slot = mine.buffers[one.source];
    if (slot.pending || slot.content || slot.user) return wrong("received over what is still needed");
    slot.pending = true;
    edges_[{one.peer, r}].receives.push_back({one.source, what});
    return exchange(one.peer, r);
  }

  /// Rendezvous: the first send and the first receive of an edge meet.
  outcome exchange(int from, int to) {
    edge& e = edges_[{from, to}];
    while (!e.sends.empty() && !e.receives.empty()) {
      posted_send const s = e.sends.front();
      posted_receive const d = e.receives.front();
      e.sends.pop_front();
      e.receives.pop_front();
      if (!(s.content == d.expected)) return wrong("another message arrives than the one posted for");
      ranks_[static_cast<std::size_t>(from)].sends[s.slot]->complete = true;
      buffer& into = ranks_[static_cast<std::size_t>(to)].buffers[d.slot];
      into.pending = false;
      into.content = s.content;
    }
    return {};
  }

  std::string left_behind() const {
    for (int r = 0; r < plan_.size.ranks; ++r) {
      std::string const who = "rank " + std::to_string(r);
      rank const& mine = ranks_[static_cast<std::size_t>(r)];
      for (activation const& slot : mine.activations) {
        if (slot.graph || slot.outputs || slot.input_gradients) return who + " keeps a graph or a result";
      }
      for (buffer const& slot : mine.buffers) {
        if (slot.pending || slot.content || slot.user) return who + " keeps what it received";
      }
      for (auto const& slot : mine.sends) {
        if (slot) return who + " never waits for a send";
      }
      if (static_cast<int>(mine.computed.size()) != plan_.length(r)) return who + " computes more or less than its plan";
      for (int i = 0; i < plan_.length(r); ++i) {
        action const is = mine.computed[static_cast<std::size_t>(i)], planned = plan_.at(r, i);
        if (!(is == planned) || is.fused != planned.fused) return who + " computes in another order than its plan";
      }
      if (plan_.forward_only) continue;
      for (int s = 0; s < plan_.stages; ++s) {
        if (plan_.rank_of_stage(s) == r && mine.summed.count(s) == 0) return who + " never sums a stage's gradients";
      }
      if (!mine.stepped) return who + " never steps";
    }
    return {};
  }

  program_view program_;
  plan_view plan_;
  std::vector<rank> ranks_;
  std::map<std::pair<int, int>, edge> edges_;
  std::map<int, int> added_;  // gradients added up, by stage
};

}  // namespace chevron::tests
