#pragma once

#include <algorithm>
#include <compare>
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
      if (at.op.kind == kind::send_forward || at.op.kind == kind::send_backward) out.push_back({r, at.peer});
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace chevron
