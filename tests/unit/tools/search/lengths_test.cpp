// Microbatches of unequal length: a search's times are the timeline's, its schedules lawful and short; their order.
// computes: whole searches
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <chevron/csv/csv.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/search.hpp>
#include <chevron/tools/show/html_model.hpp>

#include "unit/prove/bound_support.hpp"

using namespace chevron;
using namespace chevron::test;
using search::find;
using search::found;
using search::objective;

namespace {

/// A schedule of the catalogue, which gives the placement, too.
plan known_plan(char const* schedule, int ranks, int micro_batches) {
  plan made = catalogue::make_plan(schedule, {ranks, micro_batches});
  REQUIRE_FALSE(check(made));
  return made;
}

auto where_of(plan const& p) {
  return placement::mapped([stages = p.stages](shape) { return stages; },
                           [rank_of = p.rank_of.data](int s, shape) -> int { return rank_of[s]; });
}

bool ascending(plan const& p) { return same_gradient_order(p, in_ascending_order(p)); }

/// The shortest of the catalogue on these stages within a limit in whole chunks, microbatches in ascending order.
double shortest_published(plan const& like, cost_view const& costs, int limit, objective goal) {
  double out = 1e300;
  catalogue::for_each([&](auto const& one) {
    plan const p = expand(one, like.size);
    if (check(p) || p.forward_only || p.stages != like.stages) return;
    for (int s = 0; s < p.stages; ++s) {
      if (p.rank_of.data[s] != like.rank_of.data[s]) return;
    }
    if (limit > 0 && peak_in_flight(p) > limit) return;
    out = std::min(out, search::length_of(goal, in_ascending_order(p), costs));
  });
  return out;
}

/// Everything that must hold of a plan that was made for lengths.
void hold(found const& got, cost_view const& costs, int limit, objective goal) {
  INFO(describe(check(got.best)).str());
  REQUIRE_FALSE(check(got.best));
  CHECK(got.length == doctest::Approx(search::length_of(goal, got.best, costs)).epsilon(1e-12));
  CHECK(got.bound <= got.length * (1 + 1e-12));
  CHECK(ascending(got.best));
  if (limit > 0) CHECK(peak_in_flight(got.best) <= limit);
}

// The compiler counts with lengths, too: 1F1B on two ranks, a message of half a length (worked out by hand).
constexpr double thrice[] = {1, 3};
constexpr costs each_one{.forward = 1, .backward_input = 1, .backward_weight = 1, .communication = .5};
constexpr cost_view of_unequal() {
  cost_view out = each_one;
  out.lengths = {thrice, thrice, 2};
  return out;
}
constexpr plan two_by_two() { return catalogue::make_plan("1F1B", {2, 2}); }
static_assert(makespan(two_by_two(), of_unequal()) == 22);
static_assert(bounds(two_by_two(), of_unequal()).makespan == 18);  // the way of the long one: 3 + 1.5 + 3 + 3 + 1.5 + 3 + 3
static_assert(search::improve({.where = placed_on(placement::linear, {2, 2}), .costs = of_unequal()}, {.trials = 50}).length <
              22);
static_assert(makespan(back_to_back(two_by_two(), 2), of_unequal()) > 22 + 18);  // each step with the same lengths

}  // namespace

TEST_CASE("messages in a report are each microbatch's own") {
  std::vector<double> const message = show::facts_of(two_by_two(), of_unequal()).message;
  CHECK(message == std::vector<double>{.5, 1.5});
  CHECK(show::facts_of(two_by_two(), each_one).message == std::vector<double>{.5});
}

TEST_CASE("what a search plays is the timeline, whole and repaired move by move") {
  std::mt19937 random(1);
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble", "V-Half", "Interleaved1F1B", "GPipe"}) {
    for (int draw = 0; draw < 24; ++draw) {
      CAPTURE(name);
      plan const made = known_plan(name, 2 + draw % 3, 6 + draw % 5);
      stage_costs<most_stages> each = some_costs(random);
      each.communication_occupies = static_cast<occupies>(draw % 4);  // a replay takes wires to be free
      each.hidden = 0;
      some_lengths const lengths(random, made.size.micro_batches);
      cost_view const costs = lengths.on(each);
      objective const goal = draw % 2 == 0 ? objective::makespan : objective::span;
      bool const split = std::string(name) != "1F1B" && std::string(name) != "Interleaved1F1B" && std::string(name) != "GPipe";
      plan apart = search::detail::taken_apart(made, split);
      apart.in_flight_limit = 0;  // it moves without one
      search::detail::replay played(apart, costs, goal);
      REQUIRE(played.play());
      timeline const when = simulate(apart, costs);
      for (int i = 0; i < apart.actions.count; ++i) {
        CHECK(played.finish.data[played.order.data[i]] == doctest::Approx(when.end.data[i]).epsilon(1e-12));
      }
      if (goal == objective::makespan || each.communication_occupies == occupies::nobody)
        CHECK(played.length() == doctest::Approx(search::length_of(goal, apart, when)).epsilon(1e-12));
      // Its own length of an order made by many moves, each of which it repaired.
      search::detail::annealing moves(apart, {.costs = costs, .goal = goal}, static_cast<std::uint64_t>(draw));
      search::detail::watched nobody({});
      moves.run(400, 0, nobody);
      moves.write_best(apart);
      REQUIRE_FALSE(check(apart));
      CHECK(moves.best_length() == doctest::Approx(search::length_of(goal, apart, costs)).epsilon(1e-12));
    }
  }
}

TEST_CASE("found for lengths: lawful, within memory, in ascending order, between the bound and what is published") {
  std::mt19937 random(2);
  int better = 0, searched = 0;
  for (char const* name : {"1F1B", "ZBVZeroBubble", "Interleaved1F1B", "Hanayo"}) {
    for (int ranks : {2, 3, 4}) {
      for (int micro_batches : {5, 8, 12}) {
        CAPTURE(name);
        CAPTURE(ranks);
        CAPTURE(micro_batches);
        plan const like = known_plan(name, ranks, micro_batches);
        stage_costs<most_stages> const each = some_costs(random);
        some_lengths const lengths(random, micro_batches);
        cost_view const costs = lengths.on(each);
        int const chunks = like.stages / ranks;
        std::array const limits{0, chunks * ranks, chunks * ranks + 2};
        int const limit = limits[random() % 3];
        objective const goal = random() % 2 == 0 ? objective::makespan : objective::span;
        work_graph const work = random() % 4 == 0 ? work_graph::full_backward : work_graph::split_backward;
        double const published = shortest_published(like, costs, limit, goal);
        activation_limit const memory{static_cast<double>(limit), 1};
        found const got =
            find({.where = placed_on(where_of(like), like.size), .costs = costs, .memory = memory, .goal = goal, .work = work},
                 {.trials = 300});
        hold(got, costs, limit, goal);
        found const small = search::improve(
            {.where = placed_on(where_of(like), like.size), .costs = costs, .memory = memory, .goal = goal, .work = work},
            {.trials = 300});
        hold(small, costs, limit, goal);
        if (work == work_graph::split_backward && published < 1e300) {
          CHECK(got.length <= published * (1 + 1e-11));
          CHECK(small.length <= published * (1 + 1e-11));
          better += got.length < published * (1 - 1e-9) ? 1 : 0;
        }
        ++searched;
      }
    }
  }
  CHECK(better > searched / 3);
}

TEST_CASE("as short as the best of all orders in which microbatches ascend, where all can be tried") {
  std::mt19937 random(3);
  for (auto const& [ranks, micro_batches, draws] : {std::array{1, 4, 3}, std::array{2, 3, 20}, std::array{3, 2, 20}, std::array{3, 3, 2}}) {
    for (int draw = 0; draw < draws; ++draw) {
      stage_costs<most_stages> each = some_costs(random);
      each.communication_occupies = draw % 2 == 0 ? occupies::nobody : occupies::wire;
      each.hidden = 0;
      some_lengths const lengths(random, micro_batches);
      for (int limit : {0, 1, 2}) {
        cost_view const costs = lengths.on(each);
        lower_bounds const least = shortest(ranks, micro_batches, limit, costs);
        for (objective goal : {objective::makespan, objective::span}) {
          CAPTURE(ranks);
          CAPTURE(micro_batches);
          CAPTURE(limit);
          double const wanted = goal == objective::makespan ? least.makespan : least.span;
          found const got = find({.where = placed_on(placement::linear, {ranks, micro_batches}),
                                  .costs = costs,
                                  .memory = {static_cast<double>(limit), 1},
                                  .goal = goal},
                                 {.trials = 3000});
          CHECK(got.length >= wanted * (1 - 1e-12));
          CHECK(got.length <= wanted * 1.03);
        }
      }
    }
  }
}

TEST_CASE("what adds up in another order begins in ascending order; exchanged places make no order longer") {
  std::mt19937 random(7);
  plan const backwards = known_plan("LoopedBFS", 3, 6);
  some_lengths const lengths(random, 6);
  costs const each{10, 13, 7, 1};
  cost_view const costs = lengths.on(each);
  REQUIRE_FALSE(ascending(backwards));
  CHECK(ascending(search::detail::to_begin_with(backwards, costs)));
  CHECK_FALSE(ascending(search::detail::to_begin_with(backwards, each)));
  plan const runs = known_plan("1F1B", 3, 6);
  length_factors const given{lengths.computation, lengths.transfer};
  search::detail::random_numbers dice(1);
  search::detail::watched nobody({});
  std::vector<int> order{0, 1, 2, 3, 4, 5};
  search::detail::exchange_places(runs, {.costs = costs}, 300, dice, nobody, order);
  cost_view seen = each;
  length_factors const exchanged = given.in(order);
  seen.lengths = exchanged.view();
  CHECK(makespan(runs, seen) < .9 * makespan(runs, costs));
}

TEST_CASE("factors of 1 change nothing that is found") {
  std::vector<double> const ones(12, 1);
  for (objective goal : {objective::makespan, objective::span}) {
    for (int limit : {0, 6, 10}) {
      costs const each{10, 13, 7, 1};
      cost_view with = each;
      with.lengths = {ones.data(), ones.data(), 12};
      activation_limit const memory{static_cast<double>(limit), 1};
      found const plain =
          find({.where = placed_on(placement::vee, {3, 12}), .costs = each, .memory = memory, .goal = goal}, {.trials = 2000});
      found const got =
          find({.where = placed_on(placement::vee, {3, 12}), .costs = with, .memory = memory, .goal = goal}, {.trials = 2000});
      CHECK(got.length == plain.length);
      CHECK(got.bound == doctest::Approx(plain.bound).epsilon(1e-12));
      CHECK(show::csv(got.best) == show::csv(plain.best));
    }
  }
}

TEST_CASE("planned again from what runs: never longer, within its memory, with the same order of gradients") {
  std::mt19937 random(4);
  int shorter = 0, looked = 0;
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble", "V-Half", "DualPipeV", "Interleaved1F1B"}) {
    for (int draw = 0; draw < 12; ++draw) {
      CAPTURE(name);
      plan const runs = known_plan(name, 2 + draw % 3, 8 + draw % 5);
      stage_costs<most_stages> const each = some_costs(random);
      some_lengths const lengths(random, runs.size.micro_batches);
      cost_view const costs = lengths.on(each);
      objective const goal = draw % 2 == 0 ? objective::makespan : objective::span;
      int const limit = peak_in_flight(runs);
      found const got =
          search::replan(runs, {.costs = costs, .memory = {static_cast<double>(limit), 1}, .goal = goal}, {.trials = 300});
      hold(got, costs, limit, goal);
      CHECK(same_gradient_order(got.best, runs));
      CHECK(got.length <= search::length_of(goal, runs, costs));
      shorter += got.length < .99 * search::length_of(goal, runs, costs) ? 1 : 0;
      ++looked;
      CHECK(show::csv(got.best) ==
            show::csv(
                search::replan(runs, {.costs = costs, .memory = {static_cast<double>(limit), 1}, .goal = goal}, {.trials = 300})
                    .best));
      CHECK(search::replan(runs, {.costs = costs, .memory = {1, 1}, .goal = goal}).best.problem);
    }
  }
  CHECK(shorter > looked / 4);
}

TEST_CASE("planned again over wires that are waited for: never longer, though local search takes every wire to be free") {
  std::mt19937 random(23);
  for (int draw = 0; draw < 60; ++draw) {
    int const ranks = 2 + draw % 3, micro_batches = 4 + draw % 5;
    plan const runs = known_plan(draw % 2 == 0 ? "ZBVZeroBubble" : "1F1B", ranks, micro_batches);
    stage_costs<most_stages> each = some_costs(random);
    for (double& one : each.communication) one = 5 + static_cast<double>(random() % 10);
    each.communication_occupies = occupies::wire;
    some_lengths const lengths(random, micro_batches);
    cost_view const costs = lengths.on(each);
    search::effort const tried{.trials = 400, .seed = static_cast<std::uint64_t>(draw)};
    found const first = search::replan(runs, {.costs = costs, .memory = {static_cast<double>(peak_in_flight(runs)), 1}}, tried);
    REQUIRE_FALSE(first.best.problem);
    CHECK(first.length <= makespan(runs, costs));
    CHECK(first.length == makespan(first.best, costs));
    found const again =
        search::replan(first.best, {.costs = costs, .memory = {static_cast<double>(peak_in_flight(runs)), 1}}, tried);
    CHECK(again.length <= first.length);
    CHECK(again.length == makespan(again.best, costs));
  }
}

TEST_CASE("the order in which microbatches go in") {
  std::mt19937 random(5);
  std::lognormal_distribution<double> length(0, .7);
  double given = 0, found_length = 0;
  for (int draw = 0; draw < 8; ++draw) {
    int const ranks = 2 + draw % 3, micro_batches = 3 * ranks;
    std::vector<double> tokens;
    for (int m = 0; m < micro_batches; ++m) tokens.push_back(100 * length(random));
    length_factors const factors = factors_of(tokens, 100, .2);
    CHECK(factors.computation[0] == doctest::Approx(.8 * tokens[0] / 100 + .2 * tokens[0] * tokens[0] / 10000));
    CHECK(factors.transfer[0] == tokens[0] / 100);
    costs const each{10, 13, 7, 1};
    cost_view costs = each;
    costs.lengths = factors.view();
    auto const held_by = [&](search::order_found const& got) {
      std::vector<int> sorted = got.order;
      std::sort(sorted.begin(), sorted.end());
      for (int m = 0; m < micro_batches; ++m) CHECK(sorted[static_cast<std::size_t>(m)] == m);
      cost_view seen = each;
      length_factors const in_order = factors.in(got.order);
      CHECK(std::ranges::equal(in_order.computation, got.lengths.computation));
      CHECK(std::ranges::equal(in_order.transfer, got.lengths.transfer));
      seen.lengths = in_order.view();
      hold(got, seen, ranks, objective::makespan);
      CHECK(got.length <= got.as_given);
    };
    activation_limit const memory{static_cast<double>(ranks), 1};
    search::order_found const got = search::find_order(
        {.where = placed_on(placement::linear, {ranks, micro_batches}), .costs = costs, .memory = memory}, {.trials = 1000});
    held_by(got);
    CHECK(got.as_given == find({.where = placed_on(placement::linear, {ranks, micro_batches}), .costs = costs, .memory = memory},
                               {.trials = 1000})
                              .length);
    plan const runs = known_plan("1F1B", ranks, micro_batches);
    search::order_found const quick = search::reorder(runs, {.costs = costs, .memory = memory});
    held_by(quick);
    CHECK(quick.as_given == search::replan(runs, {.costs = costs, .memory = memory}).length);
    given += got.as_given;
    found_length += got.length;
  }
  CHECK(found_length < .9 * given);
  // Nothing to choose: as given.
  search::order_found const alike = search::find_order({.where = placed_on(placement::linear, {3, 6})});
  CHECK(alike.order == std::vector<int>{0, 1, 2, 3, 4, 5});
  CHECK(alike.length == alike.as_given);
  // Nothing published: the catalogue has no schedule with so few chunks in flight.
  search::order_found const unknown =
      search::find_order({.where = placed_on(placement::loop, {3, 7, 3}), .memory = {5}}, {.trials = 50});
  CHECK_FALSE(check(unknown.best));
  CHECK(unknown.published_length == 0);
}

TEST_CASE("draws multiply what lengths make of the costs") {
  plan const p = known_plan("ZBVZeroBubble", 3, 7);
  std::mt19937 random(6);
  stage_costs<most_stages> const each = some_costs(random);
  some_lengths const lengths(random, 7);
  cost_view const costs = lengths.on(each);
  std::vector<double> const none = search::sampled_lengths(p, costs, {.spread = 0, .draws = 1});
  CHECK(none.front() == doctest::Approx(makespan(p, costs)).epsilon(1e-12));
  search::duration_sample const drawn({.spread = .2}, p.stages, 7, 0, 0);
  search::sampled_costs const now(costs, drawn);
  action const one = make_action(kind::backward_input, 2, 4);
  CHECK(now.of_action(one) ==
        doctest::Approx(lengths.computation[4] * each.backward_input[2] * drawn.factor(kind::backward_input, 2, 4)));
}
