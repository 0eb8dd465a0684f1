// Lower bounds: no schedule beats them; good ones meet them; what an exhaustive search finds lies between.
#include <doctest/doctest.h>

#include <array>
#include <random>
#include <string>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bound.hpp>
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
          catalogue::for_each([&](auto const& one) {
            plan p = expand(one, {ranks, micro_batches, chunks});
            if (!check(p)) hold(p, costs, seen);
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

TEST_CASE("the smallest limit that can be kept") {
  CHECK(least_in_flight(catalogue::make_plan("1F1B", {4, 8})) == 1);
  CHECK(least_in_flight(catalogue::make_plan("Interleaved1F1B", {4, 8, 3})) == 3);
  CHECK(least_in_flight(catalogue::make_plan("ZBVZeroBubble", {4, 8})) == 2);
}
