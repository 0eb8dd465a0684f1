#pragma once

#include <algorithm>
#include <compare>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>

/// \file
/// Which ranks talk to which.

namespace chevron {

/// A direction between two pipeline ranks: a channel that delivers in order.
struct edge {
  int from = 0;
  int to = 0;
  friend auto operator<=>(edge const&, edge const&) = default;
};

/// The directed edges of a whole program, sorted, each once: the same list on every rank.
inline std::vector<edge> edges_of(program_view const& program) {
  std::vector<edge> out;
  for (int r = 0; r < program.plan.size.ranks; ++r) {
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& at = program.at(r, i);
      if (is_send(at.op.kind)) out.push_back({r, at.peer});
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

/// The same edges in rounds: a rank has at most one edge in a round, so all edges of a round can be joined at once, and joining
/// takes as many rounds as ranks have edges, however many ranks there are. A chain has four. Greedy colouring, in the given
/// order.
inline std::vector<edge> in_rounds(std::span<edge const> edges) {
  std::vector<std::pair<int, edge>> all;  // by round
  std::map<int, std::set<int>> taken;  // rounds by rank
  for (edge const& e : edges) {
    int round = 0;
    while (taken[e.from].contains(round) || taken[e.to].contains(round)) ++round;
    taken[e.from].insert(round);
    taken[e.to].insert(round);
    all.emplace_back(round, e);
  }
  std::sort(all.begin(), all.end());
  std::vector<edge> out;
  for (auto const& [round, e] : all) out.push_back(e);
  return out;
}

}  // namespace chevron
