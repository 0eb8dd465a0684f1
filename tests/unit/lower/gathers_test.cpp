// The fewest gathers of stages under FSDP, beside a search through all choices of the stages that stay gathered, and their
// places, beside all places that leave room.
// computes: thousands of random orders through all choices
#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/gathers.hpp>

#include "unit/tools/show/show_support.hpp"

using namespace chevron;

namespace {

/// An order of one rank: the stages of each computation, two for a fused pair.
using order = std::vector<std::vector<int>>;

/// A plan with this order on its only rank. It breaks other laws.
plan plan_of(order const& of, int stages) {
  std::string row;
  for (std::size_t i = 0; i < of.size(); ++i) {
    std::string const unit = std::to_string(i);
    if (of[i].size() == 1)
      row += std::to_string(of[i][0]) + "F" + unit + " ";
    else
      row += "(" + std::to_string(of[i][0]) + "F" + unit + ";" + std::to_string(of[i][1]) + "B" + unit + ") ";
  }
  return show_test::plan_from({row}, std::vector<int>(static_cast<std::size_t>(stages), 0), static_cast<int>(of.size()));
}

/// The stages, as bits, that must be gathered during a computation.
unsigned wanted_during(order const& of, std::size_t step, int resident) {
  unsigned out = 0;
  for (int s : of[step]) out |= 1u << s;
  if (step + 1 == of.size()) return out;
  for (int s : of[step + 1]) {
    if (std::popcount(out | 1u << s) <= resident) out |= 1u << s;
  }
  return out;
}

/// The fewest gathers, from all sets of stages that may be gathered during each computation.
int fewest_of_all(order const& of, int stages, int resident) {
  constexpr int never = 1 << 20;
  std::vector<int> least(1u << stages, never);
  least[0] = 0;
  for (std::size_t i = 0; i < of.size(); ++i) {
    unsigned const wanted = wanted_during(of, i, resident);
    std::vector<int> now(least.size(), never);
    for (unsigned before = 0; before < least.size(); ++before) {
      for (unsigned set = 0; set < now.size() && least[before] < never; ++set) {
        if ((set & wanted) == wanted && std::popcount(set) <= resident)
          now[set] = std::min(now[set], least[before] + std::popcount(set & ~before));
      }
    }
    least = now;
  }
  return *std::min_element(least.begin(), least.end());
}

/// Plays the events. \returns the number of gathers, or -1 at a fault
int played(order const& of, std::vector<gather_event> const& events, int resident) {
  unsigned gathered = 0;
  int gathers = 0, position = 0;
  std::size_t next = 0;
  auto const play = [&](bool before) {
    for (; next < events.size() && events[next].position == position && events[next].gathers == before; ++next) {
      unsigned const bit = 1u << events[next].stage;
      if (((gathered & bit) != 0) == before) return false;
      gathered ^= bit;
      gathers += before ? 1 : 0;
      if (std::popcount(gathered) > resident) return false;
    }
    return true;
  };
  for (std::size_t i = 0; i < of.size(); ++i) {
    unsigned const wanted = wanted_during(of, i, resident);
    if (!play(true) || (gathered & wanted) != wanted || !play(false)) return -1;
    position += static_cast<int>(of[i].size());
  }
  return next == events.size() && gathered == 0 ? gathers : -1;
}

/// One stay of a stage: gathered before step `begin`, first computed in `first`, freed after `last`.
struct stay {
  int stage = 0;
  int begin = 0;
  int first = 0;
  int last = 0;
};

/// The stays of an order whose computations are single, from its events; those that begin together in the order of the events.
std::vector<stay> stays_of(order const& of, std::vector<gather_event> const& events) {
  std::vector<stay> out;
  for (gather_event const& one : events) {
    if (one.gathers) {
      int first = one.position;
      while (of[static_cast<std::size_t>(first)][0] != one.stage) ++first;
      out.push_back({one.stage, one.position, first, -1});
    } else {
      for (stay& s : out) s.last = s.stage == one.stage && s.last < 0 ? one.position : s.last;
    }
  }
  return out;
}

/// Calls `judge` with all begins, sorted, of these stays, in any order of gathers, with which at most `resident` stages are
/// gathered during each step.
template <class Judge>
void for_all_places(std::vector<stay> const& stays, int resident, Judge const& judge) {
  std::vector<int> begins, during(20);
  auto const place = [&](auto const& next, std::size_t at) -> void {
    if (at == stays.size()) {
      std::vector<int> sorted = begins;
      std::sort(sorted.begin(), sorted.end());
      judge(sorted);
      return;
    }
    for (int begin = 0; begin <= stays[at].first; ++begin) {
      bool fits = true;
      for (int i = begin; i <= stays[at].last; ++i) fits = ++during[static_cast<std::size_t>(i)] <= resident && fits;
      begins.push_back(begin);
      if (fits) next(next, at + 1);
      begins.pop_back();
      for (int i = begin; i <= stays[at].last; ++i) --during[static_cast<std::size_t>(i)];
    }
  };
  place(place, 0);
}

int total_of(char const* name, shape size, int resident) {
  int gathers = 0;
  plan const p = catalogue::make_plan(name, size);
  for (std::vector<gather_event> const& events : fewest_gathers(p, resident).of_rank)
    gathers += static_cast<int>(std::count_if(events.begin(), events.end(), [](gather_event const& e) { return e.gathers; }));
  return gathers;
}

}  // namespace

TEST_SUITE("gathers") {
  TEST_CASE("random orders, single and fused: as few gathers as the best of all choices, and each order can be played") {
    std::mt19937 dice(1);
    auto const below = [&](int n) { return static_cast<int>(dice() % static_cast<unsigned>(n)); };
    int pairs = 0, more_than_stages = 0;
    for (int round = 0; round < 3000; ++round) {
      int const stages = 1 + below(5);
      order of;
      for (int i = 1 + below(14); i > 0; --i) {
        int const first = below(stages), second = below(stages);
        if (below(4) == 0 && first != second) {
          of.push_back({first, second});
          ++pairs;
        } else {
          of.push_back({first});
        }
      }
      for (int resident = 2; resident <= stages + 1; ++resident) {
        gather_plan const made = fewest_gathers(plan_of(of, stages), resident);
        CHECK(!made.problem);
        REQUIRE(made.of_rank.size() == 1);
        int const best = fewest_of_all(of, stages, resident);
        int const ours = played(of, made.of_rank[0], resident);
        if (ours != best) FAIL_CHECK("round " << round << ", " << resident << " resident: " << ours << " gathers, not " << best);
        more_than_stages += best > stages ? 1 : 0;
      }
    }
    CHECK(pairs > 1000);
    CHECK(more_than_stages > 500);  // orders in which stages are gathered again
  }

  TEST_CASE("one resident stage: a gather for each change of the stage, and no fused pair of two stages") {
    order const of{{0}, {0}, {1}, {0}, {2}, {2}};
    gather_plan const made = fewest_gathers(plan_of(of, 3), 1);
    CHECK(played(of, made.of_rank.at(0), 1) == 4);
    gather_plan const refused = fewest_gathers(plan_of({{0}, {1, 0}}, 2), 1);
    CHECK(refused.of_rank.empty());
    CHECK(
        describe(refused.problem).str() ==
        "rank 0, step 1: 1F1 runs as a pair, whose halves need two stages gathered at once. Remedy: at least 2 resident stages; "
        "the pair's other half is 0B1");
    CHECK(!fewest_gathers(plan_of({{0}, {1, 0}}, 2), 2).problem);
  }

  TEST_CASE("random orders: gathers in the order of their uses, and no places leave room for an earlier n-th gather") {
    std::mt19937 dice(2);
    auto const below = [&](int n) { return static_cast<int>(dice() % static_cast<unsigned>(n)); };
    int places = 0, early = 0;
    for (int round = 0; round < 400; ++round) {
      int const stages = 1 + below(4);
      order of;
      for (int i = 1 + below(9); i > 0; --i) of.push_back({below(stages)});
      for (int resident = 1; resident <= stages; ++resident) {
        std::vector<stay> const stays = stays_of(of, fewest_gathers(plan_of(of, stages), resident).of_rank.at(0));
        for (std::size_t n = 1; n < stays.size(); ++n) {
          CHECK(stays[n - 1].first < stays[n].first);
          CHECK(stays[n - 1].begin <= stays[n].begin);
        }
        for (stay const& s : stays) early += s.begin + 1 < s.first ? 1 : 0;
        int beaten = 0;
        if (stays.size() > 6) continue;
        for_all_places(stays, resident, [&](std::vector<int> const& begins) {
          ++places;
          for (std::size_t n = 0; n < begins.size(); ++n) beaten += begins[n] < stays[n].begin ? 1 : 0;
        });
        if (beaten > 0) FAIL_CHECK("round " << round << ", " << resident << " resident: " << beaten << " earlier gathers");
      }
    }
    CHECK(places > 5000);
    CHECK(early > 200);  // gathers more than one computation ahead
  }

  TEST_CASE("fused pairs: a gather moves forward by whole pairs") {
    order const of{{0, 1}, {1}, {1}, {1, 2}};
    std::vector<gather_event> const events = fewest_gathers(plan_of(of, 3), 2).of_rank.at(0);
    std::string row;
    for (gather_event const& e : events)
      row += std::to_string(e.position) + (e.gathers ? "+" : "-") + std::to_string(e.stage) + " ";
    CHECK(row == "0+0 0+1 0-0 2+2 4-1 4-2 ");
  }

  TEST_CASE("a stage is freed after its last computation before its next gather, and its room is used at once") {
    // Stage 0 is not needed until the end: it leaves after its first computation, and stage 2 comes, three steps before its use.
    plan const p = plan_of({{0}, {1}, {1}, {1}, {2}, {1}, {0}}, 3);
    std::vector<gather_event> const events = fewest_gathers(p, 2).of_rank.at(0);
    std::string row;
    for (gather_event const& e : events)
      row += std::to_string(e.position) + (e.gathers ? "+" : "-") + std::to_string(e.stage) + " ";
    CHECK(row == "0+0 0+1 0-0 1+2 4-2 5+0 5-1 6-0 ");
  }

  TEST_CASE("schedules of the catalogue: as many gathers as stages where all fit, and counts that were found by hand") {
    for (char const* name : {"GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"}) {
      plan const p = catalogue::make_plan(name, {4, 8, 0});
      CHECK(total_of(name, {4, 8, 0}, p.size.chunks) == p.stages);
    }
    CHECK(total_of("Interleaved1F1B", {4, 8, 4}, 3) == 28);
    CHECK(total_of("Interleaved1F1B", {8, 32, 8}, 6) == 176);
    CHECK(total_of("LoopedBFS", {4, 8, 4}, 3) == 20);
  }
}
