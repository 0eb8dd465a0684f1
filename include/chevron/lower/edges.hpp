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
/// The pairs of ranks between which a program sends messages.

namespace chevron {

/// A directed pair of pipeline ranks: a channel that delivers messages in order.
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

/// Orders edges in rounds by greedy colouring, in the given order: a rank has at most one edge in a round, so all edges of a
/// round can be connected at once. The number of rounds depends on the number of edges of a rank, not on the number of ranks; a
/// chain has four.
inline std::vector<edge> in_rounds(std::span<edge const> edges) {
  std::vector<std::pair<int, edge>> all;  // each edge with its round
  std::map<int, std::set<int>> taken;  // by rank: the rounds of its edges
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
