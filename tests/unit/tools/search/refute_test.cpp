// Bounds by refuting: never above the shortest of all orders, and mostly equal to it.
// computes: all orders of small plans, and cases of larger ones
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/refute/refute.hpp>
#include <chevron/tools/search/start.hpp>

#include "unit/prove/bound_support.hpp"

using namespace chevron;
using namespace chevron::test;

namespace {

struct tally {
  int compared = 0, met = 0, raised = 0, above = 0;

  /// \param bound raised up to more than the shortest, so that nothing keeps a wrong one down
  void hold(double before, double bound, double shortest) {
    ++compared;
    above += bound > shortest * (1 + 1e-9) || bound < before * (1 - 1e-12) ? 1 : 0;
    met += bound > shortest * (1 - 1e-9) ? 1 : 0;
    raised += bound > before * (1 + 1e-9) ? 1 : 0;
  }
};

/// Both bounds, raised for a length that is not the shortest.
lower_bounds raised(plan_view const& like, cost_view const& costs, activation_limit memory, lower_bounds const& least,
                    lower_bounds const& best, double more = 1.05) {
  return {refute({.where = like, .costs = costs, .memory = memory}, least.makespan, best.makespan * more).bound,
          refute({.where = like, .costs = costs, .memory = memory, .goal = search::objective::span}, least.span, best.span * more)
              .bound};
}

}  // namespace

TEST_CASE("all orders of small pipelines: the shortest is the bound, however long what was found is") {
  std::mt19937 random(5);
  tally makespans, spans, spans_refuted;
  for (auto const& [ranks, micro_batches, draws] :
       {std::array{2, 3, 30}, std::array{2, 4, 2}, std::array{3, 2, 30}, std::array{3, 3, 1}}) {
    for (int draw = 0; draw < draws; ++draw) {
      stage_costs<most_stages> each = some_costs(random);
      each.communication_occupies = occupies::nobody;
      each.hidden = 0;
      some_lengths const lengths(random, micro_batches);
      cost_view const costs = draw % 2 == 0 ? cost_view(each) : lengths.on(each);
      plan const like = catalogue::make_plan("1F1B", {ranks, micro_batches});
      for (int limit : {0, 1, 2, 3}) {
        for (double const kept : {1., .5}) {
          activation_limit const memory{static_cast<double>(limit), kept};
          lower_bounds const least = bounds(like, costs, memory);
          lower_bounds const best = shortest(ranks, micro_batches, memory, costs);
          for (double const more : {1., 1.05, 1.5}) {
            lower_bounds const got = raised(like, costs, memory, least, best, more);
            makespans.hold(least.makespan, got.makespan, best.makespan);
            spans.hold(least.span, got.span, best.span);
            if (ranks == 2 || !costs.lengths.alike()) spans_refuted.hold(least.span, got.span, best.span);
          }
        }
      }
    }
  }
  CHECK(makespans.above == 0);
  CHECK(spans.above == 0);
  CHECK(makespans.met == makespans.compared);
  // By span an order in which microbatches do not ascend may be shorter, and the bound is one for these, too.
  CHECK(spans_refuted.met > spans_refuted.compared * 9 / 10);
  CHECK(makespans.raised > makespans.compared / 10);
  CHECK(spans.raised > spans.compared / 20);
}

TEST_CASE("microbatches that do not ascend beat no bound where they are alike") {
  std::mt19937 random(6);
  tally makespans, spans;
  for (auto const& [ranks, micro_batches, draws] : {std::array{2, 2, 60}, std::array{3, 2, 12}}) {
    for (int draw = 0; draw < draws; ++draw) {
      stage_costs<most_stages> costs = some_costs(random);
      costs.hidden = 0;
      if (draw % 2 == 0) costs.communication_occupies = occupies::nobody;
      plan const like = catalogue::make_plan("1F1B", {ranks, micro_batches});
      for (int limit : {0, 1}) {
        activation_limit const memory{static_cast<double>(limit), 1};
        lower_bounds const least = bounds(like, costs, memory);
        lower_bounds const best = shortest_of_any_order(ranks, micro_batches, memory, costs);
        lower_bounds const got = raised(like, costs, memory, least, best);
        makespans.hold(least.makespan, got.makespan, best.makespan);
        spans.hold(least.span, got.span, best.span);
      }
    }
  }
  CHECK(makespans.above == 0);
  CHECK(spans.above == 0);
  CHECK(makespans.met > makespans.compared / 2);
  CHECK(spans.met > spans.compared / 2);
}

TEST_CASE(
    "by span a rank may begin with another microbatch than the one that comes first, and that beats all orders in which they "
    "ascend") {
  constexpr stage_costs<4> costs{{18, 9, 19, 16}, {7, 6, 8, 15}, {17, 15, 6, 18}, {}};
  plan const made = read_csv(
                        "0F0,0F1,2F1,0F2,2F0,2F2,2I1,2I0,2W1,0I1,0W1,0I0,2I2,2W0,0W0,2W2,0I2,0W2\n"
                        "1F1,1F0,3F1,3I1,1F2,3F0,3I0,1I1,3F2,1I0,3I2,1W0,1I2,3W0,3W2,3W1,1W1,1W2")
                        .plan;
  REQUIRE_FALSE(check(made));
  CHECK(span(made, costs) == 247);
  search::found const got =
      search::find({.where = placed_on(placement::loop, {2, 3, 2}), .costs = costs, .goal = search::objective::span});
  CHECK(got.length == 256);  // by CP-SAT the shortest where microbatches ascend
  CHECK(got.bound <= 247);
  CHECK(refute({.where = made, .costs = costs, .goal = search::objective::span}, bounds(made, costs, {}).span, 300).bound <= 247);
}

TEST_CASE("no schedule of the catalogue and none that is searched beats a raised bound") {
  std::mt19937 random(7);
  tally known, searched;
  for (int draw = 0; draw < 60; ++draw) {
    int const ranks = 2 + draw % 3, micro_batches = 2 + static_cast<int>(random() % 5), chunks = 1 + draw % 2;
    stage_costs<most_stages> each = some_costs(random);
    if (draw % 2 == 0) each.communication_occupies = occupies::nobody;
    if (draw % 3 != 0) each.hidden = 0;
    some_lengths const lengths(random, micro_batches);
    cost_view const costs = draw % 4 == 0 ? lengths.on(each) : cost_view(each);
    catalogue::for_each([&](auto const& one) {
      plan p = expand(one, {ranks, micro_batches, chunks});
      if (check(p) || p.forward_only) return;
      if (!costs.lengths.alike()) p = search::detail::to_begin_with(std::move(p), costs);
      for (double const most : {0., static_cast<double>(peak_in_flight(p))}) {
        activation_limit const memory{most, 1};
        lower_bounds const least = bounds(p, costs, memory);
        lower_bounds const best{makespan(p, costs), span(p, costs)};
        lower_bounds const got{
            refute({.where = p, .costs = costs, .memory = memory}, least.makespan, best.makespan * 1.1, 1'000'000).bound,
            refute({.where = p, .costs = costs, .memory = memory, .goal = search::objective::span}, least.span, best.span * 1.1,
                   1'000'000)
                .bound};
        known.hold(least.makespan, got.makespan, best.makespan);
        known.hold(least.span, got.span, best.span);
      }
    });
    // Compares found lengths, for split and full backwards, with a bound that was given more time.
    for (work_graph const work : {work_graph::split_backward, work_graph::full_backward}) {
      activation_limit const memory{static_cast<double>(chunks + static_cast<int>(random() % 3)), draw % 5 == 0 ? .5 : 1.};
      search::objective const goal = draw % 3 == 0 ? search::objective::span : search::objective::makespan;
      bool const split = work == work_graph::split_backward, by_span = goal == search::objective::span;
      plan const placed = chunks == 1 ? placed_on(placement::linear, {ranks, micro_batches})
                                      : placed_on(placement::vee, {ranks, micro_batches, 2});
      search::problem const asked{.where = placed, .costs = costs, .memory = memory, .goal = goal, .work = work};
      search::found const got = search::find(asked, {.trials = 500});
      REQUIRE_FALSE(got.best.problem);
      owned_costs const whole = unsplit(costs, got.best.stages);
      cost_view const counted = split ? costs : whole.view();
      lower_bounds const least = bounds(got.best, counted, memory);
      double const before = by_span ? least.span : least.makespan;
      searched.hold(before, refute(asked, before, got.length * 1.02).bound, got.length);
      searched.above += got.bound > got.length * (1 + 1e-9) ? 1 : 0;
    }
  }
  CHECK(known.above == 0);
  CHECK(known.compared > 500);
  CHECK(known.raised > 100);
  CHECK(searched.above == 0);
  CHECK(searched.met > searched.compared * 6 / 10);
}

TEST_CASE("a bound that is too high is seen: one for less memory, for slower messages, or for work that is not there") {
  std::mt19937 random(8);
  tally less_memory, slower, more_work;
  for (int draw = 0; draw < 40; ++draw) {
    stage_costs<most_stages> costs = some_costs(random);
    costs.communication_occupies = occupies::nobody;
    costs.hidden = 0;
    plan const like = catalogue::make_plan("1F1B", {2, 3});
    activation_limit const memory{2, 1};
    lower_bounds const least = bounds(like, costs, memory);
    lower_bounds const best = shortest(2, 3, memory, costs);
    auto const hold = [&](tally& seen, cost_view const& with, activation_limit limit) {
      lower_bounds const got = raised(like, with, limit, least, best, 1.2);
      seen.hold(least.makespan, got.makespan, best.makespan);
    };
    hold(less_memory, costs, {1, 1});
    stage_costs<most_stages> late = costs;
    for (double& latency : late.latency) latency += .5;
    hold(slower, late, memory);
    stage_costs<most_stages> more = costs;
    more.backward_weight[1] *= 1.2;
    hold(more_work, more, memory);
  }
  CHECK(less_memory.above > 20);
  CHECK(slower.above > 20);
  CHECK(more_work.above > 5);
}

TEST_CASE("by span refuting ends, however many ways to begin there are, and is for two ranks where microbatches are alike") {
  costs const each{10, 13, 7, 1};
  for (auto const& [ranks, micro_batches, limit] : {std::array{2, 200, 1}, std::array{8, 16, 4}, std::array{16, 64, 8}}) {
    plan const like = catalogue::make_plan("ZB-H1", {ranks, micro_batches});
    activation_limit const memory{static_cast<double>(limit), 1};
    double const least = bounds(like, each, memory).span;
    double const got =
        refute({.where = like, .costs = each, .memory = memory, .goal = search::objective::span}, least, 2 * least, 100'000)
            .bound;
    CHECK(got >= least);
    if (ranks > 2) CHECK(got == least);
  }
  // Of microbatches that go in as they are given each rank begins with the first.
  plan const like = catalogue::make_plan("ZB-H1", {3, 4});
  length_factors const factors = factors_of(std::vector<double>{1, 3, 1, 2}, 1, 0);
  cost_view unequal = each;
  unequal.lengths = factors.view();
  int raised_by_lengths = 0;
  for (double const limit : {1., 2., 3.}) {
    double const least = bounds(like, unequal, {limit, 1}).span;
    raised_by_lengths +=
        refute({.where = like, .costs = unequal, .memory = {limit, 1}, .goal = search::objective::span}, least, 2 * least).bound >
                least
            ? 1
            : 0;
  }
  CHECK(raised_by_lengths > 0);
  // Here the second rank's later stage feeds the third, whose beginning no case has.
  plan const odd = read_csv("0F0,0F1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n3F0,3B0,3F1,3B1").plan;
  REQUIRE_FALSE(check(odd));
  cost_view also = each;
  length_factors const two = factors_of(std::vector<double>{1, 2}, 1, 0);
  also.lengths = two.view();
  double const plain = bounds(odd, also, {2, 1}).span;
  CHECK(refute({.where = odd, .costs = also, .memory = {2, 1}, .goal = search::objective::span}, plain, 2 * plain).bound ==
        plain);
}

TEST_CASE("what is not refuted stays as it was") {
  plan const like = catalogue::make_plan("ZB-H1", {4, 8});
  costs const each{10, 13, 7, 1};
  activation_limit const memory{3, 1};
  lower_bounds const least = bounds(like, each, memory);
  // With three microbatches in flight idle time remains: lengths below 350, which search finds, are refuted.
  CHECK(refute({.where = like, .costs = each, .memory = memory}, least.makespan, 350).bound == 350);
  CHECK(refute({.where = like, .costs = each, .memory = memory}, least.makespan, 350, 1).bound == least.makespan);
  CHECK(refute({.where = like, .costs = each, .memory = memory}, 350, 350).bound == 350);
  CHECK(refute({.where = like, .costs = each, .memory = memory}, 400, 350).bound == 400);
  costs pairs = each;
  pairs.hidden = .1;
  CHECK(refute({.where = like, .costs = pairs, .memory = memory}, least.makespan, 350).bound == least.makespan);
  costs wires = each;
  wires.communication_occupies = occupies::wire;
  CHECK(refute({.where = like, .costs = wires, .memory = memory}, least.makespan, 350).bound == 350);
  CHECK(refute({.where = like, .costs = wires, .memory = memory, .goal = search::objective::span}, least.span, 350).bound ==
        least.span);
}
