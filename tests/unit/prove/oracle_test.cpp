// computes: tens of thousands of random plans
#include "oracle.hpp"

#include <string>
#include <type_traits>

#include "mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

bool breaks(unsigned broken, law l) { return (broken & (1u << static_cast<int>(l))) != 0; }

/// Whether the plan has the finding's action at its rank and step.
bool names_its_place(finding const& f, plan_view const& p) {
  if (f.rank < 0 || f.position < 0) return f.rank < p.size.ranks;
  return f.rank < p.size.ranks && f.position < p.length(f.rank) && p.at(f.rank, f.position) == f.what;
}

struct tally {
  int seen = 0;
  int lawful = 0;
  int by_law[law_count] = {};
  void count(finding const& f) {
    ++seen;
    lawful += f.broken == law::none ? 1 : 0;
    ++by_law[static_cast<int>(f.broken)];
  }
};

}  // namespace

// The seed of each round is its number: a failure names it, and `dice{seed}` plays it again alone.
TEST_SUITE("oracle") {
  TEST_CASE("10,000 random lawful plans: no false alarm, and their programs run with rendezvous sends") {
    int instructions = 0, reached = 0;
    for (unsigned seed = 0; seed < 10000; ++seed) {
      dice d{std::mt19937(seed)};
      plan const p = lawful_plan(d);
      unsigned const broken = broken_laws(p);
      finding const f = check(p);
      if (broken != 0 || f) {
        DOCTEST_FAIL_CHECK("seed ", seed, ": the oracle says ", broken, ", check says ", describe(f).str(), "\n", written(p));
        continue;
      }
      owned_program const lowered = lower(prove(p)).copy();
      finding const g = check(lowered.view());
      std::string const why = machine(lowered).run(d.random);
      if (g || !why.empty()) {
        DOCTEST_FAIL_CHECK("seed ", seed, ": the machine says '", why, "', check says ", describe(g).str(), "\n",
                           written(lowered));
        continue;
      }
      instructions += lowered.view().total();
      ++reached;
    }
    DOCTEST_CHECK(reached == 10000);
    DOCTEST_CHECK(instructions > 500000);
  }

  TEST_CASE("10,000 mutants of plans: no false alarm, no missed fault, each with a law that is really broken") {
    tally t;
    for (unsigned seed = 100000; seed < 110000; ++seed) {
      dice d{std::mt19937(seed)};
      plan const p = mutant(d, lawful_plan(d));
      unsigned const broken = broken_laws(p);
      finding const f = check(p);
      t.count(f);
      bool const agree = f ? breaks(broken, f.broken) && names_its_place(f, p) : broken == 0;
      if (!agree)
        DOCTEST_FAIL_CHECK("seed ", seed, ": the oracle says ", broken, ", check says ", std::string(name_of(f.broken)), ", ",
                           describe(f).str(), "\n", written(p));
    }
    DOCTEST_CHECK(t.seen == 10000);
    DOCTEST_CHECK(t.lawful > 1000);
    for (law l : {law::placement, law::ids_in_range, law::no_duplicate, law::complete, law::order, law::fused_pair, law::deadlock,
                  law::in_flight, law::bytes, law::messages})
      DOCTEST_CHECK_MESSAGE(t.by_law[static_cast<int>(l)] >= 20, std::string(name_of(l)), " ", t.by_law[static_cast<int>(l)]);
  }

  TEST_CASE("10,000 mutants of plans: played in turns, as a compiler does, and as far as each rank can go, they end alike") {
    int through = 0, refused = 0;
    for (unsigned seed = 100000; seed < 110000; ++seed) {
      dice d{std::mt19937(seed)};
      plan const p = mutant(d, lawful_plan(d));
      if (p.problem || detail::check_placement(p)) continue;
      auto const plays = [&](auto in_turns) {
        plan_view const view = p;
        buffer<std::uint8_t> state(view.stages * view.size.units(), zeroed);
        buffer<int> next(view.size.ranks), after(view.size.ranks);
        return detail::plays_through<in_turns.value>(view, state.data, next.data, after.data);
      };
      bool const answer = plays(std::true_type{});
      ++(answer ? through : refused);
      if (answer != plays(std::false_type{})) DOCTEST_FAIL_CHECK("seed ", seed, ": ", answer, " in turns\n", written(p));
    }
    DOCTEST_CHECK(through > 1000);
    DOCTEST_CHECK(refused > 1000);
  }

  TEST_CASE("10,000 mutants of programs: refused exactly when the machine goes wrong") {
    tally t;
    for (unsigned seed = 200000; seed < 210000; ++seed) {
      dice d{std::mt19937(seed)};
      owned_program const p = mutant(d, lower(prove(lawful_plan(d))).copy());
      std::string const why = machine(p).run(d.random);
      finding const f = check(p.view());
      t.count(f);
      if (why.empty() != (f.broken == law::none))
        DOCTEST_FAIL_CHECK("seed ", seed, ": the machine says '", why, "', check says ", std::string(name_of(f.broken)), ", ",
                           describe(f).str(), "\n", written(p));
    }
    DOCTEST_CHECK(t.seen == 10000);
    DOCTEST_CHECK(t.lawful > 1000);
    for (law l : {law::ids_in_range, law::no_duplicate, law::complete, law::order, law::fused_pair, law::deadlock, law::matched,
                  law::slots})
      DOCTEST_CHECK_MESSAGE(t.by_law[static_cast<int>(l)] >= 20, std::string(name_of(l)), " ", t.by_law[static_cast<int>(l)]);
  }
}
