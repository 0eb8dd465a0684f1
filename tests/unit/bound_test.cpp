// Lower bounds: no schedule beats them; good ones meet them; what an exhaustive search finds lies between.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>

using namespace chevron;

namespace {

constexpr int most_stages = 64;

/// Costs of all sorts: the same for all stages or not, with and without messages, pairs that hide, no first input gradient.
stage_costs<most_stages> some_costs(std::mt19937& random) {
  auto const up_to = [&](double top) { return top * static_cast<double>(random()) / 4294967296.0; };
  stage_costs<most_stages> out;
  bool const even = random() % 2 == 0;
  double const alike[3] = {up_to(3), up_to(3), up_to(3)};
  double const top = random() % 3 == 0 ? 1 : 0;
  for (int s = 0; s < most_stages; ++s) {
    out.forward[s] = even ? alike[0] : up_to(3);
    out.backward_input[s] = even ? alike[1] : up_to(3);
    out.backward_weight[s] = even ? alike[2] : up_to(3);
    if (s + 1 < most_stages) out.communication[s] = up_to(top);
  }
  out.hidden = random() % 2 == 0 ? 0 : up_to(1);
  out.communication_occupies = static_cast<occupies>(random() % 4);
  out.first_input_gradient = random() % 4 != 0;
  return out;
}

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

/// All orders of one rank with one stage: F, I and W of each microbatch in that order, microbatches in their order.
void all_orders(int stage, int micro_batches, int limit, int (&done)[3], std::vector<action>& so_far,
                std::vector<std::vector<action>>& out) {
  if (done[2] == micro_batches) return out.push_back(so_far);
  constexpr kind kinds[] = {kind::forward, kind::backward_input, kind::backward_weight};
  for (int k = 0; k < 3; ++k) {
    if (done[k] == (k == 0 ? micro_batches : done[k - 1])) continue;
    if (k == 0 && limit > 0 && done[0] - done[2] == limit) continue;
    so_far.push_back(make_action(kinds[k], stage, done[k]++));
    all_orders(stage, micro_batches, limit, done, so_far, out);
    so_far.pop_back();
    --done[k];
  }
}

/// The shortest of all plans with one stage a rank, by makespan and by span.
lower_bounds shortest(int ranks, int micro_batches, int limit, cost_view const& costs) {
  std::vector<std::vector<std::vector<action>>> orders(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    int done[3] = {};
    std::vector<action> so_far;
    all_orders(r, micro_batches, limit, done, so_far, orders[static_cast<std::size_t>(r)]);
  }
  plan p;
  p.size = {ranks, micro_batches, 1};
  p.stages = ranks;
  p.rank_of = buffer<std::int16_t>(ranks);
  p.begin = buffer<int>(ranks + 1);
  p.actions = buffer<action>(3 * ranks * micro_batches);
  for (int r = 0; r <= ranks; ++r) p.begin.data[r] = 3 * micro_batches * r;
  for (int r = 0; r < ranks; ++r) p.rank_of.data[r] = static_cast<std::int16_t>(r);
  std::vector<std::size_t> choice(static_cast<std::size_t>(ranks), 0);
  lower_bounds best{1e300, 1e300};
  while (true) {
    for (int r = 0; r < ranks; ++r) {
      auto const& order = orders[static_cast<std::size_t>(r)][choice[static_cast<std::size_t>(r)]];
      std::copy(order.begin(), order.end(), p.actions.data + p.begin.data[r]);
    }
    if (timeline const when = simulate(p, costs); when.complete) {
      best.makespan = std::min(best.makespan, makespan(p, when));
      best.span = std::min(best.span, span(p, when));
    }
    std::size_t r = 0;
    while (r < choice.size() && ++choice[r] == orders[r].size()) choice[r++] = 0;
    if (r == choice.size()) return best;
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
      costs.communication_occupies = occupies::nobody;
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
