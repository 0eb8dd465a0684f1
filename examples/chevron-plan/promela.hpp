#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/channels.hpp>
#include "promela_machine.hpp"

/// \file
/// A lowered program as a model for SPIN: tables of its instructions, and a machine that carries them out. SPIN then looks at all
/// orders in which the ranks may come, for a wrong message, a wrong slot, a broken limit, and ranks that wait for ever.

namespace chevron::show {

/// A program in numbers, as the machine reads them (promela_machine.hpp). It holds whatever the program holds, lawful or not.
struct promela_tables {
  static constexpr int none = 65535;  ///< no peer, no slot: Promela's tables hold no negative numbers

  int ranks = 0, stages = 0, micro_batches = 0, slices = 1, forward_only = 0, edges = 0;  ///< `micro_batches` are units
  std::int64_t in_flight_limit = 0, byte_limit = 0, message_limit = 0;
  std::vector<int> home;                          ///< by stage: its rank
  std::vector<std::int64_t> weight;               ///< by stage: bytes of a microbatch in flight
  std::vector<std::int64_t> input_weight;         ///< by stage: of these, from F to R
  std::vector<int> runs_again;                    ///< by (stage, microbatch): the plan has its R
  std::vector<int> activations, receives, sends;  ///< by rank: how many slots
  std::vector<int> start, plan_start;             ///< by rank: its first instruction, its first action of the plan
  std::vector<int> code;                          ///< by instruction: kind, stage, microbatch, peer, slot, source, local, fused
  std::vector<int> plan;                          ///< by action of the plan: kind, stage, microbatch, fused
  std::vector<int> edge;                          ///< by sender × ranks + receiver: the edge's number, or `none`
  /// Messages that share a channel: 0, of an edge; 1, of a pair of ranks; 2, of all ranks, alone or in batches. A message may run
  /// once so many messages of its channel, its turn, have ended on its rank.
  int channels = 0;
  std::vector<int> first_send, first_receive;  ///< by edge: where its turns begin
  std::vector<int> send_turn, receive_turn;    ///< of an edge's k-th send or receive
  std::vector<int> small;                      ///< of an edge's k-th send: 1 if it ends without its receive
  /// By instruction: it runs once so many messages have ended on its rank; 0 unless hosts wait.
  std::vector<int> after_messages;
};

namespace detail {

/// A kind as promela_machine.hpp numbers it.
constexpr int promela_kind(kind what) {
  switch (what) {
    case kind::forward:
      return 0;
    case kind::backward:
      return 1;
    case kind::backward_input:
      return 2;
    case kind::backward_weight:
      return 3;
    case kind::recompute:
      return 4;
    case kind::own_x:
    case kind::own_y:
    case kind::own_z:
      return 5 + own_number(what);
    case kind::send_forward:
      return 8;
    case kind::receive_forward:
      return 9;
    case kind::send_backward:
      return 10;
    case kind::receive_backward:
      return 11;
    case kind::wait_send_forward:
      return 12;
    case kind::wait_send_backward:
      return 13;
    case kind::reduce_gradients:
      return 14;
    case kind::optimizer_step:
      return 15;
    case kind::unshard:
      return 16;
  }
  return promela_tables::none;
}

template <class Number>
std::string promela_array(std::string const& name, std::vector<Number> const& values) {
  std::string out = "hidden int " + name + "[" + std::to_string(std::max<std::size_t>(values.size(), 1)) + "] = {";
  for (std::size_t i = 0; i < values.size(); ++i) out += (i == 0 ? " " : ", ") + std::to_string(values[i]);
  return out + (values.empty() ? " 0 };\n" : " };\n");
}

inline int promela_most(std::vector<int> const& of) {
  return of.empty() ? 1 : std::max(1, *std::max_element(of.begin(), of.end()));
}

}  // namespace detail

/// The turns of a program's messages on their channels, and what hosts wait for.
inline void add_turns(promela_tables& out, program_view const& program, channel_rules rules, size_view sizes,
                      std::int64_t buffered_below) {
  out.channels = rules.model == channel_model::edge ? 0 : rules.model == channel_model::pair ? 1 : 2;
  std::vector<std::vector<int>> sends(static_cast<std::size_t>(out.edges)), receives(sends), small(sends);
  for (int r = 0; r < out.ranks; ++r) {
    std::map<std::pair<int, bool>, int> so_far;  // by channel: its messages on this rank
    int batch = 0, size = 0;                     // messages before the batch, messages in it so far
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& one = program.at(r, i);
      kind const what = one.op.kind;
      bool const sent = is_send(what);
      bool const message = (sent || is_receive(what)) && one.peer >= 0 && one.peer < out.ranks;
      // What parts two batches; over channels without batches each message is one.
      bool const apart = what != kind::reduce_gradients && what != kind::unshard && what != kind::optimizer_step;
      if (rules.model != channel_model::batched || (!message && apart)) batch += std::exchange(size, 0);
      out.after_messages.push_back(rules.hosts_wait ? batch : 0);
      if (!message) continue;
      ++size;
      int const from = sent ? r : one.peer, to = sent ? one.peer : r;
      std::size_t const edge = static_cast<std::size_t>(out.edge[static_cast<std::size_t>(from * out.ranks + to)]);
      int const earlier = so_far[{out.channels == 2 ? 0 : one.peer, out.channels == 0 && sent}]++;
      (sent ? sends : receives)[edge].push_back(rules.model == channel_model::batched ? batch : earlier);
      if (!sent) continue;
      int const boundary = static_cast<int>(one.op.stage) - (what == kind::send_forward ? 0 : 1);
      bool const known = buffered_below > 0 && boundary >= 0 && boundary + 1 < out.stages;
      small[edge].push_back(known && sizes.message_of(boundary) < buffered_below ? 1 : 0);
    }
  }
  auto const append = [](std::vector<int>& to, std::vector<int> const& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (std::size_t edge = 0; edge < sends.size(); ++edge) {
    out.first_send.push_back(static_cast<int>(out.send_turn.size()));
    out.first_receive.push_back(static_cast<int>(out.receive_turn.size()));
    append(out.send_turn, sends[edge]);
    append(out.receive_turn, receives[edge]);
    append(out.small, small[edge]);
  }
}

/// The tables of a program.
/// \param rules which messages share a channel, and whether hosts wait; but for Chevron's own rules the messages must match one
///              to one
/// \param sizes bytes of the messages of each boundary, if `buffered_below` is not 0
/// \param buffered_below sends of fewer bytes end without their receives, as soon as they are in front of their channel
inline promela_tables promela_tables_of(program_view const& program, channel_rules rules = {}, size_view sizes = {},
                                        std::int64_t buffered_below = 0) {
  plan_view const& plan = program.plan;
  promela_tables out;
  auto const slot = [](std::uint16_t n) { return n == no_slot ? promela_tables::none : static_cast<int>(n); };
  out.ranks = plan.size.ranks;
  out.stages = plan.stages;
  out.micro_batches = plan.size.units();
  out.slices = plan.size.slices;
  out.forward_only = plan.forward_only ? 1 : 0;
  out.in_flight_limit = plan.in_flight_limit;
  out.message_limit = plan.message_limit;
  // Bytes in their largest common unit: Promela counts to 2 147 483 647.
  std::int64_t unit = 0;
  for (int s = 0; s < plan.stages && plan.byte_limit > 0; ++s)
    unit = std::gcd(unit, std::gcd(plan.stage_bytes[s], plan.input_bytes[s]));
  for (int s = 0; s < plan.stages; ++s) {
    out.home.push_back(plan.rank_of[s]);
    std::int64_t const all = unit == 0 ? 0 : plan.stage_bytes[s] / unit, input = unit == 0 ? 0 : plan.input_bytes[s] / unit;
    out.weight.push_back(all);
    out.input_weight.push_back(input == 0 ? all : input);
  }
  out.runs_again.assign(static_cast<std::size_t>(plan.stages * plan.size.units()), 0);
  for (int i = 0; i < plan.total(); ++i) {
    action const a = plan.actions[i];
    if (a.kind == kind::recompute && static_cast<int>(a.stage) < plan.stages)
      out.runs_again[static_cast<std::size_t>(static_cast<int>(a.stage) * plan.size.units()) + a.micro_batch] = 1;
  }
  out.byte_limit = unit == 0 ? 0 : plan.byte_limit / unit;
  // Less than one unit is a limit that the smallest chunk breaks, and not none.
  if (unit != 0 && out.byte_limit == 0) {
    for (auto* const list : {&out.weight, &out.input_weight}) {
      for (std::int64_t& each : *list) each *= 2;
    }
    out.byte_limit = 1;
  }
  out.edge.assign(static_cast<std::size_t>(out.ranks * out.ranks), promela_tables::none);
  for (int r = 0; r < out.ranks; ++r) {
    out.activations.push_back(program.slots[r].activation);
    out.receives.push_back(program.slots[r].receive);
    out.sends.push_back(program.slots[r].send);
    out.start.push_back(program.begin[r]);
    out.plan_start.push_back(plan.begin[r]);
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& one = program.at(r, i);
      bool const has_peer = one.peer >= 0 && one.peer < out.ranks;
      for (int const number : {detail::promela_kind(one.op.kind), static_cast<int>(one.op.stage),
                               static_cast<int>(one.op.micro_batch), has_peer ? one.peer : promela_tables::none, slot(one.slot),
                               slot(one.source), slot(one.local), static_cast<int>(one.op.fused)})
        out.code.push_back(number);
      bool const receives = one.op.kind == kind::receive_forward || one.op.kind == kind::receive_backward;
      if (!has_peer || !(receives || one.op.kind == kind::send_forward || one.op.kind == kind::send_backward)) continue;
      int const from = receives ? one.peer : r, to = receives ? r : one.peer;
      int& number = out.edge[static_cast<std::size_t>(from * out.ranks + to)];
      if (number == promela_tables::none) number = out.edges++;
    }
    for (int i = 0; i < plan.length(r); ++i) {
      action const one = plan.at(r, i);
      for (int const number : {detail::promela_kind(one.kind), static_cast<int>(one.stage), static_cast<int>(one.micro_batch),
                               static_cast<int>(one.fused)})
        out.plan.push_back(number);
    }
  }
  out.start.push_back(program.begin[out.ranks]);
  out.plan_start.push_back(plan.begin[out.ranks]);
  add_turns(out, program, rules, sizes, buffered_below);
  return out;
}

/// The program as a model. Sends are rendezvous, but for small ones; `spin -DBUFFERED` has all of them buffered. Parameters as of
/// `promela_tables_of`.
inline std::string promela(program_view const& program, channel_rules rules = {}, size_view sizes = {},
                           std::int64_t buffered_below = 0) {
  promela_tables const all = promela_tables_of(program, rules, sizes, buffered_below);
  int const activations = detail::promela_most(all.activations), receives = detail::promela_most(all.receives),
            sends = detail::promela_most(all.sends);
  int const most_tensor = 2 * all.stages * all.micro_batches;
  bool const small = most_tensor < 255;
  // What a state takes: SPIN wants to be told where it is more than 1024 bytes.
  int const tensor = small ? 1 : 4;
  int const memory = all.ranks * (activations * (3 * tensor + 2) + receives * 2 * tensor + sends * (tensor + 5) + 26);
  int const queues = all.edges * ((sends + receives) * (tensor + 2) + 18) + 4 * all.ranks * all.ranks;
  int const messages = static_cast<int>(std::max<std::size_t>(all.send_turn.size(), 1));
  int const sequences = all.slices == 1 ? 1 : all.stages * all.micro_batches / all.slices;
  int const state =
      ((memory + queues + messages + 2 * sequences + 3 * all.stages + 40 * all.ranks + 16 * all.edges + 200) / 1024 + 1) * 1024;
  auto const define = [](char const* name, std::string const& value) {
    return std::string("#define ") + name + " " + value + "\n";
  };
  auto const number = [&](char const* name, std::int64_t value) { return define(name, std::to_string(value)); };
  std::string out =
      "/* " + (*program.plan.name != 0 ? std::string(program.plan.name) + ", " : std::string()) + std::to_string(all.ranks) +
      " ranks, " + std::to_string(all.micro_batches) +
      " microbatches, as chevron-plan lowers it, for SPIN:\n\n"
      "     spin -a FILE && gcc -O2 -DSAFETY -DVECTORSZ=" +
      std::to_string(state) +
      " -o pan pan.c && ./pan -m1000000\n\n"
      "   `errors: 0` says that in no order of the ranks a wrong message, slot or order is met, a limit is broken or "
      "ranks wait for\n   ever. Sends are rendezvous" +
      (buffered_below > 0 ? " from " + std::to_string(buffered_below) + " bytes on" : std::string()) +
      "; with spin -DBUFFERED they are buffered. Channels: " + name_of(rules.model) +
      (rules.hosts_wait ? "; a rank waits\n   at each message until it has ended" : "") + ". */\n";
  out +=
      number("ranks", all.ranks) + number("stages", all.stages) + number("micro_batches", all.micro_batches) +
      number("slices", all.slices) + number("forward_only", all.forward_only) + number("in_flight_limit", all.in_flight_limit) +
      number("byte_limit", all.byte_limit) + number("message_limit", all.message_limit) + number("edges", all.edges) +
      number("channels", all.channels) + number("none", promela_tables::none) + define("tensor", small ? "byte" : "int") +
      define("slot_number", std::max(receives, sends) < 255 ? "byte" : "short") +
      number("pending", small ? 255 : most_tensor + 1) + number("MOST_RANKS", all.ranks) + number("MOST_STAGES", all.stages) +
      number("MOST_EDGES", std::max(all.edges, 1)) + number("MOST_ACTIVATIONS", activations) + number("MOST_RECEIVES", receives) +
      number("MOST_SENDS", sends) + number("MOST_MESSAGES", messages) + number("MOST_SEQUENCES", sequences) +
      define("prepare", "skip");
  out += "#ifdef BUFFERED\n#define buffered 1\n#else\n#define buffered 0\n#endif\n";
  out += detail::promela_array("home", all.home) + detail::promela_array("weight", all.weight) +
         detail::promela_array("input_weight", all.input_weight) + detail::promela_array("runs_again", all.runs_again) +
         detail::promela_array("activations", all.activations) + detail::promela_array("receives", all.receives) +
         detail::promela_array("sends", all.sends) + detail::promela_array("start", all.start) +
         detail::promela_array("plan_start", all.plan_start) + detail::promela_array("edge", all.edge) +
         detail::promela_array("first_send", all.first_send) + detail::promela_array("first_receive", all.first_receive) +
         detail::promela_array("send_turn", all.send_turn) + detail::promela_array("receive_turn", all.receive_turn) +
         detail::promela_array("small", all.small) + detail::promela_array("after_messages", all.after_messages);

  // The long tables a line an instruction, each with its name.
  out += "/* kind, stage, microbatch, peer, slot, source, local, fused */\nhidden int code[" +
         std::to_string(std::max<std::size_t>(all.code.size(), 1)) + "] = {\n";
  for (int r = 0; r < all.ranks; ++r) {
    for (int i = 0; i < program.length(r); ++i) {
      std::string line = "  ";
      std::size_t const first = static_cast<std::size_t>(program.begin[r] + i) * 8;
      for (std::size_t f = 0; f < 8; ++f) {
        bool const last = first + f + 1 == all.code.size();
        line += (f > 0 ? " " : "") + std::to_string(all.code[first + f]) + (last ? "" : ",");
      }
      out += line + "  /* rank " + std::to_string(r) + ", " + std::to_string(i) + ": " + to_text(program.at(r, i).op).str() +
             " */\n";
    }
  }
  out += "};\n/* kind, stage, microbatch, fused */\n" + detail::promela_array("plan", all.plan);
  return out + std::string(promela_machine);
}

}  // namespace chevron::show
