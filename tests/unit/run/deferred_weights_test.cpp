// Weight gradients that ranks hold back (run/execute/deferred_weights.hpp): the oracle says of the orders that may come of it, at random
// sizes of the pool and with messages that come when they like, whether they are lawful.
#include "unit/prove/oracle.hpp"

#include <deque>
#include <vector>

#include "unit/prove/mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

/// A plan in which ranks hold back W's. What a rank waits for is drawn: whether a message has come is another's doing.
/// \param keeps_limits whether an F comes after a W where it would exceed a limit of the plan's
plan deferred(plan const& from, int pool, dice& d, bool keeps_limits) {
  plan out = from;
  plan_view const view = from;
  for (int r = 0; r < view.size.ranks; ++r) {
    action* to = out.actions.data + out.begin.data[r];
    std::deque<action> held;
    int chunks = 0;
    std::int64_t bytes = 0;
    auto const bytes_of = [&](action a) { return view.byte_limit > 0 ? view.stage_bytes[a.stage] : 0; };
    auto const put = [&](action a) {
      *to++ = a;
      int const by = a.kind == kind::forward ? 1 : a.kind == kind::backward_input ? 0 : -1;
      chunks += by;
      bytes += by * bytes_of(a);
    };
    auto const run_held = [&] {
      put(held.front());
      held.pop_front();
    };
    for (int i = 0; i < view.length(r); ++i) {
      action const a = view.at(r, i);
      bool const second_half = i > 0 && view.at(r, i - 1).fused != 0;
      if (a.kind == kind::backward_weight) {
        if (static_cast<int>(held.size()) >= pool) run_held();
        held.push_back(a);
        continue;
      }
      // The halves of a pair start together.
      bool const waits = !second_half && d.one_in(3);
      auto const exceeds = [&] {
        return keeps_limits && a.kind == kind::forward &&
               ((view.in_flight_limit > 0 && chunks + 1 > view.in_flight_limit) ||
                (view.byte_limit > 0 && bytes + bytes_of(a) > view.byte_limit));
      };
      while (!held.empty() && (exceeds() || (waits && !second_half))) run_held();
      put(a);
    }
    while (!held.empty()) run_held();
  }
  return out;
}

/// Whether the orders differ.
bool moved(plan_view const& a, plan_view const& b) {
  for (int r = 0; r < a.size.ranks; ++r) {
    for (int i = 0; i < a.length(r); ++i) {
      if (!(a.at(r, i) == b.at(r, i))) return true;
    }
  }
  return false;
}

/// A lawful plan that has W's. (With R's or own actions a rank holds none back.)
plan with_weights(dice& d) {
  for (;;) {
    plan out = lawful_plan_of_fbiw(d);
    for (int i = 0; i < out.begin.data[out.size.ranks]; ++i) {
      if (out.actions.data[i].kind == kind::backward_weight) return out;
    }
  }
}

}  // namespace

TEST_SUITE("deferred_weights") {
  TEST_CASE("4,000 random lawful plans whose ranks hold back W's: lawful, limits included, and they run with rendezvous sends") {
    int different = 0;
    for (unsigned seed = 0; seed < 4000; ++seed) {
      dice d{std::mt19937(seed)};
      plan const planned = with_weights(d);
      plan const ran = deferred(planned, 1 + d.below(4), d, true);
      different += moved(planned, ran) ? 1 : 0;
      unsigned const broken = broken_laws(ran);
      finding const f = check(ran);
      if (broken != 0 || f) {
        DOCTEST_FAIL_CHECK("seed ", seed, ": the oracle says ", broken, ", check says ", describe(f).str(), "\n", written(planned), "\n",
                           written(ran));
        continue;
      }
      program const lowered = lower(prove(ran)).copy();
      std::string const why = machine(lowered).run(d.random);
      if (!why.empty()) DOCTEST_FAIL_CHECK("seed ", seed, ": the machine says '", why, "'\n", written(ran));
    }
    DOCTEST_CHECK(different > 2000);
  }

  TEST_CASE("without a look at limits some of them break one, and nothing else") {
    int broken = 0;
    for (unsigned seed = 0; seed < 4000; ++seed) {
      dice d{std::mt19937(seed)};
      unsigned const laws = broken_laws(deferred(with_weights(d), 3, d, false));
      unsigned const limits = 1u << static_cast<int>(law::in_flight) | 1u << static_cast<int>(law::bytes);
      DOCTEST_CHECK((laws & ~limits) == 0);
      broken += laws != 0 ? 1 : 0;
    }
    DOCTEST_CHECK(broken > 100);
  }
}
