#pragma once

#include <algorithm>
#include <string>

#include <chevron/base/format.hpp>
#include <chevron/lower/program.hpp>

/// \file
/// A lowered program as text for people: each rank's instructions with their peers and slots.

namespace chevron::show {

/// A program as text: a block for each rank, a line for each instruction with its position, action, peer and slots. Each half of
/// a fused pair has a line, which names the other half.
inline std::string program_text(program_view const& program) {
  std::string out;
  for (int r = 0; r < program.plan.size.ranks; ++r) {
    slot_counts const& slots = program.slots[r];
    out += std::string(r > 0 ? "\n" : "") + "rank " + std::to_string(r) + ": " + std::to_string(program.length(r)) +
           " instructions; slots: " + std::to_string(slots.activation) + " activation, " + std::to_string(slots.receive) +
           " receive, " + std::to_string(slots.send) + " send\n";
    int const digits = static_cast<int>(std::to_string(std::max(program.length(r) - 1, 0)).size());
    std::size_t widest = 0;
    for (int i = 0; i < program.length(r); ++i)
      widest = std::max(widest, to_text(program.at(r, i).op, program.plan.size.slices).view().size());
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& one = program.at(r, i);
      std::string const position = std::to_string(i);
      std::string const name = to_text(one.op, program.plan.size.slices).str();
      std::string line = "  " + std::string(static_cast<std::size_t>(digits) - position.size(), ' ') + position + "  " + name +
                         std::string(widest - name.size(), ' ');
      auto const say = [&](std::string const& words) { line += "  " + words; };
      auto const slot = [](std::uint16_t n) { return std::to_string(n); };
      if (is_compute(one.op.kind)) {
        char const* const input = makes_output(one.op.kind) ? "input" : "gradient";
        say("slot " + slot(one.slot));
        if (one.source != no_slot) say(std::string(input) + " from receive " + slot(one.source));
        if (one.local != no_slot) say(std::string(input) + " from slot " + slot(one.local) + " on this rank");
      }
      std::string const peer = "rank " + std::to_string(one.peer);
      if (is_send(one.op.kind)) say("to " + peer + "  slot " + slot(one.slot) + ", send " + slot(one.source));
      if (is_receive(one.op.kind)) say("from " + peer + "  receive " + slot(one.source));
      if (is_wait(one.op.kind)) say("to " + peer + "  send " + slot(one.source));
      if (one.op.fused != 0 && i + 1 < program.length(r))
        say("fused with " + to_text(program.at(r, i + 1).op, program.plan.size.slices).str());
      if (i > 0 && program.at(r, i - 1).op.fused != 0)
        say("fused with " + to_text(program.at(r, i - 1).op, program.plan.size.slices).str());
      while (line.back() == ' ') line.pop_back();
      out += line + "\n";
    }
  }
  return out;
}

}  // namespace chevron::show
