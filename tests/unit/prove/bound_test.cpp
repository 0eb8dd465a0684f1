// Lower bounds: no schedule is shorter; good schedules meet them; the best of all orders is never below them.
// computes: all orders of small plans
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>

#include "bound_support.hpp"

using namespace chevron;
using namespace chevron::test;

namespace {

struct tally {
  long compared = 0;
  long met = 0;  // as short as the bound
  std::string beaten;
};

/// Holds a plan against the bounds without a limit and with its own peak as the limit.
void hold(plan& p, cost_view const& costs, tally& seen) {
  timeline const when = simulate(p, costs);
  lower_bounds const got{makespan(p, when), span(p, when)};
  for (int limit : {0, peak_in_flight(p)}) {
    p.in_flight_limit = limit;
    lower_bounds const least = bounds(p, costs);
    auto const compare = [&](double bound, double length) {
      ++seen.compared;
      if (bound > length * (1 + 1e-12) + 1e-9 && seen.beaten.empty()) {
        seen.beaten = std::string(p.name) + " P=" + std::to_string(p.size.ranks) + " M=" + std::to_string(p.size.micro_batches) +
                      " V=" + std::to_string(p.size.chunks) + " limit " + std::to_string(limit) + ": " + std::to_string(length) +
                      " is below " + std::to_string(bound);
      }
      seen.met += bound > length * (1 - 1e-12) ? 1 : 0;
    };
    compare(least.makespan, got.makespan);
    compare(least.span, got.span);
  }
}

}  // namespace

TEST_CASE("no schedule of the catalogue beats the bounds, whatever it costs") {
  std::mt19937 random(1);
  tally seen;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int micro_batches : {1, 2, 3, 5, 8, 13, 20}) {
      for (int chunks = 0; chunks <= 4; ++chunks) {
        for (int draw = 0; draw < 4; ++draw) {
          stage_costs<most_stages> const costs = some_costs(random);
          some_lengths const lengths(random, micro_batches);
          catalogue::for_each([&](auto const& one) {
            plan p = expand(one, {ranks, micro_batches, chunks});
            if (check(p)) return;
            hold(p, costs, seen);
            hold(p, lengths.on(costs), seen);
          });
        }
      }
    }
  }
  CHECK(seen.beaten == "");
  CHECK(seen.compared > 10000);
  CHECK(seen.met > 1000);
}

TEST_CASE("forwards alone") {
  std::mt19937 random(2);
  tally seen;
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (int micro_batches : {1, 2, 7}) {
      plan p = catalogue::make_plan("ForwardOnly", {ranks, micro_batches});
      REQUIRE_FALSE(check(p));
      hold(p, some_costs(random), seen);
      hold(p, some_lengths(random, micro_batches).on(some_costs(random)), seen);
      // One stage a rank, all alike: the bound is the answer.
      CHECK(bounds(p, costs{}).makespan == ranks + micro_batches - 1);
      CHECK(makespan(p, costs{}) == ranks + micro_batches - 1);
      CHECK(least_in_flight(p) == 0);
    }
  }
  CHECK(seen.beaten == "");
}

TEST_CASE("published schedules that are the best there is") {
  for (costs const& each : {costs{1, 1, 1}, costs{2, 2, 1}, costs{1, 1.5, .5}}) {
    for (int ranks : {2, 4, 8}) {
      for (int micro_batches : {2 * ranks, 4 * ranks}) {
        CAPTURE(ranks);
        CAPTURE(micro_batches);
        // ZB-H1, at 1F1B's memory, by both lengths.
        plan p = catalogue::make_plan("ZB-H1", {ranks, micro_batches});
        p.in_flight_limit = ranks;
        CHECK(bounds(p, each).makespan == doctest::Approx(makespan(p, each)).epsilon(1e-12));
        CHECK(bounds(p, each).span == doctest::Approx(span(p, each)).epsilon(1e-12));
      }
      // At equal costs ZB-H2, ZB-V and the interleaved zero bubble need nothing but the first way in.
      int const micro_batches = 3 * ranks;
      for (char const* name : {"ZB-H2", "ZBVZeroBubble", "InterleavedZeroBubble"}) {
        CAPTURE(name);
        plan p = catalogue::make_plan(name, {ranks, micro_batches});
        CHECK(bounds(p, costs{}).makespan == makespan(p, costs{}));
      }
    }
  }
}

TEST_CASE("all orders of small pipelines: none beats the bounds, and often one meets them") {
  std::mt19937 random(3);
  int met = 0;
  int compared = 0;
  for (auto const& [ranks, micro_batches, draws] :
       {std::array{1, 5, 3}, std::array{2, 3, 30}, std::array{2, 4, 2}, std::array{3, 2, 30}, std::array{3, 3, 2}}) {
    for (int draw = 0; draw < draws; ++draw) {
      stage_costs<most_stages> costs = some_costs(random);
      costs.communication_occupies = draw % 2 == 0 ? occupies::nobody : occupies::wire;
      for (double& transfer : costs.communication) transfer *= draw % 2 == 1 ? 6 : 1;  // a wire has less time than ranks
      costs.hidden = 0;
      for (int limit : {0, 1, 2, 3}) {
        plan const like = catalogue::make_plan("1F1B", {ranks, micro_batches});
        lower_bounds const least = bounds(like, costs, {static_cast<double>(limit), 1});
        lower_bounds const best = shortest(ranks, micro_batches, limit, costs);
        CAPTURE(ranks);
        CAPTURE(micro_batches);
        CAPTURE(limit);
        CHECK(least.makespan <= best.makespan * (1 + 1e-12));
        CHECK(least.span <= best.span * (1 + 1e-12));
        CHECK(least.makespan > .7 * best.makespan);
        CHECK(least.span > .6 * best.span);
        met += (least.makespan > best.makespan * (1 - 1e-9) ? 1 : 0) + (least.span > best.span * (1 - 1e-9) ? 1 : 0);
        compared += 2;
      }
    }
  }
  CHECK(met > compared / 2);
}

TEST_CASE("all orders of small pipelines whose microbatches are of unequal length, whichever goes in first") {
  std::mt19937 random(8);
  int met = 0, compared = 0;
  for (auto const& [ranks, micro_batches, draws] :
       {std::array{1, 4, 6}, std::array{2, 3, 60}, std::array{3, 2, 60}, std::array{3, 3, 1}}) {
    for (int draw = 0; draw < draws; ++draw) {
      stage_costs<most_stages> each = some_costs(random);
      each.communication_occupies = draw % 2 == 0 ? occupies::nobody : occupies::wire;
      if (draw % 2 == 1) {
        for (double& transfer : each.communication) transfer = 1 + 2 * transfer;  // a wire has less time than ranks
      }
      each.hidden = 0;
      some_lengths const lengths(random, micro_batches);
      cost_view const costs = lengths.on(each);
      plan const like = catalogue::make_plan("1F1B", {ranks, micro_batches});
      for (int limit : {0, 1, 2, 3}) {
        lower_bounds const least = bounds(like, costs, {static_cast<double>(limit), 1});
        lower_bounds best{1e300, 1e300};
        std::vector<int> given;
        for (int m = 0; m < micro_batches; ++m) given.push_back(m);
        do {
          lower_bounds const one = shortest(ranks, micro_batches, limit, costs, given);
          best = {std::min(best.makespan, one.makespan), std::min(best.span, one.span)};
        } while (ranks * micro_batches < 9 && std::next_permutation(given.begin(), given.end()));
        CAPTURE(ranks);
        CAPTURE(micro_batches);
        CAPTURE(limit);
        CAPTURE(draw);
        CHECK(least.makespan <= best.makespan * (1 + 1e-12));
        CHECK(least.span <= best.span * (1 + 1e-12));
        met += (least.makespan > best.makespan * (1 - 1e-9) ? 1 : 0) + (least.span > best.span * (1 - 1e-9) ? 1 : 0);
        compared += 2;
      }
    }
  }
  CHECK(met > compared / 4);
}

TEST_CASE("equal factors are a unit of time") {
  std::mt19937 random(9);
  for (int draw = 0; draw < 300; ++draw) {
    int const ranks = 1 + static_cast<int>(random() % 6);
    plan const p = catalogue::make_plan("Interleaved1F1B", {ranks, 12, 1 + static_cast<int>(random() % 3)});
    stage_costs<most_stages> each = some_costs(random);
    for (double& latency : each.latency) latency = 0;
    std::vector<double> const twice(12, 2);
    cost_view costs = each;
    for (double const most : {0., 40., 12., 5.5, 3.}) {
      activation_limit const memory{most, draw % 2 == 0 ? 1 : .5};
      lower_bounds const once = bounds(p, each, memory);
      costs.lengths = {twice.data(), twice.data(), 12};
      lower_bounds const doubled = bounds(p, costs, memory);
      CHECK(doubled.makespan == doctest::Approx(2 * once.makespan).epsilon(1e-12));
      CHECK(doubled.span == doctest::Approx(2 * once.span).epsilon(1e-12));
    }
  }
}

TEST_CASE("holding less for W can only lower the bounds; a limit can only raise them") {
  std::mt19937 random(4);
  for (int draw = 0; draw < 200; ++draw) {
    stage_costs<most_stages> const costs = some_costs(random);
    int const ranks = 1 + static_cast<int>(random() % 6);
    plan const p = catalogue::make_plan("Interleaved1F1B", {ranks, 12, 1 + static_cast<int>(random() % 3)});
    lower_bounds before = bounds(p, costs, {});
    for (double most : {40., 12., 6., 5.5, 3.}) {
      lower_bounds const whole = bounds(p, costs, {most, 1});
      lower_bounds const half = bounds(p, costs, {most, .5});
      CHECK(half.makespan <= whole.makespan * (1 + 1e-12));
      CHECK(half.span <= whole.span * (1 + 1e-12));
      CHECK(before.makespan <= whole.makespan * (1 + 1e-12));
      CHECK(before.span <= whole.span * (1 + 1e-12));
      before = whole;
    }
  }
}

TEST_CASE("a limit that misses a whole number by rounding counts as that, and one below a chunk has bounds, too") {
  plan const p = catalogue::make_plan("ZBVZeroBubble", {4, 8});
  costs const each{10, 13, 7, 1};
  for (double const most : {2., 3., 4., 6.}) {
    CHECK(bounds(p, each, {most - 1e-10, 1}).makespan == doctest::Approx(bounds(p, each, {most, 1}).makespan).epsilon(1e-9));
    CHECK(bounds(p, each, {most - 1e-10, 1}).span == doctest::Approx(bounds(p, each, {most, 1}).span).epsilon(1e-9));
  }
  CHECK(std::isfinite(bounds(p, each, {.5, 1}).makespan));
  CHECK(std::isfinite(bounds(p, each, {.5, 1}).span));
}

TEST_CASE("the smallest limit that can be kept") {
  CHECK(least_in_flight(catalogue::make_plan("1F1B", {4, 8})) == 1);
  CHECK(least_in_flight(catalogue::make_plan("Interleaved1F1B", {4, 8, 3})) == 3);
  CHECK(least_in_flight(catalogue::make_plan("ZBVZeroBubble", {4, 8})) == 2);
}
