// Edges join in rounds: all edges of a round at once, in as few rounds for 64 ranks as for four.

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/edges.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/proved_plan.hpp>

#include <doctest/doctest.h>

namespace {

using chevron::edge;

/// How many rounds there are when ranks join in this order, each one edge at a time: the longest chain of edges that share a rank.
int rounds_of(std::vector<edge> const& order) {
  std::vector<int> until(64, 0);
  int most = 0;
  for (edge const& e : order) {
    int const round = std::max(until[static_cast<std::size_t>(e.from)], until[static_cast<std::size_t>(e.to)]) + 1;
    until[static_cast<std::size_t>(e.from)] = until[static_cast<std::size_t>(e.to)] = round;
    most = std::max(most, round);
  }
  return most;
}

std::vector<edge> edges_under(char const* name, int ranks) {
  auto const program =
      chevron::lower(chevron::prove(chevron::catalogue::make_plan(name, {.ranks = ranks, .micro_batches = 2 * ranks})));
  return chevron::edges_of(program.view());
}

}  // namespace

TEST_CASE("a chain of any length joins in four rounds, a ring in six") {
  for (int const ranks : {2, 3, 4, 7, 16, 64}) {
    CAPTURE(ranks);
    auto const chain = edges_under("1F1B", ranks);
    CHECK(chain.size() == static_cast<std::size_t>(2 * (ranks - 1)));
    CHECK(rounds_of(chevron::in_rounds(chain)) <= 4);
    if (ranks > 4) CHECK(rounds_of(chain) > 4);  // in the order of ranks
    if (ranks > 16) continue;
    CHECK(rounds_of(chevron::in_rounds(edges_under("Interleaved1F1B", ranks))) <= 6);
    CHECK(rounds_of(chevron::in_rounds(edges_under("ZBVZeroBubble", ranks))) <= 4);
  }
}

TEST_CASE("rounds hold every edge once, the same on every rank") {
  auto const given = edges_under("LoopedBFS", 5);
  auto const rounds = chevron::in_rounds(given);
  CHECK(rounds.size() == given.size());
  CHECK(std::set<edge>(rounds.begin(), rounds.end()) == std::set<edge>(given.begin(), given.end()));
  CHECK(chevron::in_rounds(given) == rounds);
  CHECK(chevron::in_rounds({}).empty());
}
