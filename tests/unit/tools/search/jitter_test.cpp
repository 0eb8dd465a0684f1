// Times that vary: drawn steps, figures of many steps, and a search under such times.
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/csv/csv.hpp>
#include <chevron/search.hpp>

using namespace chevron;
using search::difference;
using search::duration_sample;
using search::quantile;
using search::sampled_lengths;

namespace {

search::jitter by(double spread, int draws = 12, int replicas = 1) {
  return {.spread = spread, .replicas = replicas, .draws = draws, .seed = 3};
}

stage_costs<6> uneven() {
  stage_costs<6> out;
  for (int s = 0; s < 6; ++s) {
    out.forward[s] = 10 + s;
    out.backward_input[s] = 13 - s;
    out.backward_weight[s] = 7 + s % 3;
    if (s < 5) out.communication[s] = 0.5 + s;
  }
  return out;
}

}  // namespace

TEST_CASE("without jitter a draw takes what the plan takes, to the last bit") {
  for (occupies const who : {occupies::nobody, occupies::sender, occupies::both, occupies::wire}) {
    for (bool const first : {true, false}) {
      costs const c{.forward = 1.1,
                    .backward_input = 0.7,
                    .backward_weight = 1.3,
                    .communication = 0.3,
                    .hidden = 0.4,
                    .communication_occupies = who,
                    .first_input_gradient = first};
      int seen = 0;
      catalogue::for_each([&](auto const& one) {
        plan const p = expand(one, {4, 10, 0});
        if (p.problem) return;
        ++seen;
        for (double const length : sampled_lengths(p, c, by(0, 2, 2))) CHECK(length == makespan(p, c));
        for (double const length : sampled_lengths(p, c, by(0, 1), search::objective::span)) CHECK(length == span(p, c));
      });
      CHECK(seen >= 13);
    }
  }
}

TEST_CASE("factors have mean 1 and the spread asked for, and none is negative") {
  for (double const spread : {0.02, 0.3}) {
    double sum = 0, squares = 0, least = 1;
    duration_sample const now(by(spread), 16, 1000, 0, 0);
    int count = 0;
    for (kind const what : {kind::forward, kind::backward_input, kind::backward_weight}) {
      for (int s = 0; s < 16; ++s) {
        for (int m = 0; m < 1000; ++m, ++count) {
          double const f = now.factor(what, s, m);
          sum += f;
          squares += f * f;
          least = std::min(least, f);
        }
      }
    }
    double const mean = sum / count;
    CHECK(std::abs(mean - 1) < 4 * spread / std::sqrt(count));
    CHECK(std::sqrt(squares / count - mean * mean) == doctest::Approx(spread).epsilon(0.03));
    CHECK(least > 0);
  }
}

TEST_CASE("a factor belongs to an action, whatever else there is, and to a draw, a replica and a seed") {
  duration_sample const small(by(0.1), 4, 8, 5, 1), large(by(0.1), 9, 40, 5, 1);
  for (int s = 0; s < 4; ++s) {
    for (int m = 0; m < 8; ++m) CHECK(small.factor(kind::backward_weight, s, m) == large.factor(kind::backward_weight, s, m));
  }
  double const one = small.factor(kind::forward, 2, 3);
  CHECK(one != small.factor(kind::backward_input, 2, 3));
  CHECK(one != small.factor(kind::forward, 3, 3));
  CHECK(one != small.factor(kind::forward, 2, 4));
  CHECK(one != small.factor(kind::forward, 3, 2));
  CHECK(one != duration_sample(by(0.1), 4, 8, 6, 1).factor(kind::forward, 2, 3));
  CHECK(one != duration_sample(by(0.1), 4, 8, 5, 0).factor(kind::forward, 2, 3));
  search::jitter other = by(0.1);
  other.seed = 4;
  CHECK(one != duration_sample(other, 4, 8, 5, 1).factor(kind::forward, 2, 3));
}

TEST_CASE("on one rank all schedules take the same in each draw, a B what its I and W take") {
  costs const c{.forward = 10, .backward_input = 13, .backward_weight = 7};
  std::vector<double> const whole = sampled_lengths(expand(catalogue::gpipe, {1, 5, 0}), c, by(0.2));
  std::vector<double> const split = sampled_lengths(expand(catalogue::zb_h1, {1, 5, 0}), c, by(0.2));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CHECK(whole[i] == doctest::Approx(split[i]).epsilon(1e-12));
    CHECK(std::abs(whole[i] - 150) > 1e-3);
  }
  CHECK(sampled_lengths(expand(catalogue::gpipe, {1, 5, 0}), c, by(0.2)) == whole);
}

TEST_CASE("a step ends with its slowest replica") {
  plan const p = expand(catalogue::zb_h1, {3, 6, 0});
  costs const c{.forward = 10, .backward_input = 13, .backward_weight = 7, .communication = 1};
  std::vector<double> const alone = sampled_lengths(p, c, by(0.1)), four = sampled_lengths(p, c, by(0.1, 12, 4));
  int longer = 0;
  for (std::size_t i = 0; i < alone.size(); ++i) {
    CHECK(four[i] >= alone[i]);
    longer += four[i] > alone[i] ? 1 : 0;
  }
  CHECK(longer > 4);
  search::jitter slow = by(0, 3, 2);
  slow.slow_replica = 1.25;
  costs const silent{.forward = 10, .backward_input = 13, .backward_weight = 7};
  for (double const length : sampled_lengths(p, silent, slow)) CHECK(length == doctest::Approx(1.25 * makespan(p, silent)));
}

TEST_CASE("a slow rank is a rank whose stages cost more") {
  plan const p = expand(catalogue::zb_v, {3, 7, 0});
  stage_costs<6> const planned = uneven();
  stage_costs<6> more = planned;
  for (int s : {1, 4}) {  // rank 1's in a V of three ranks
    more.forward[s] *= 1.5;
    more.backward_input[s] *= 1.5;
    more.backward_weight[s] *= 1.5;
  }
  owned_costs const slowed = with_slower_ranks(p, planned, std::vector<double>{1, 1.5, 1});
  CHECK(makespan(p, slowed.view()) == makespan(p, more));
  CHECK(makespan(p, slowed.view()) > makespan(p, planned));
  CHECK(sampled_lengths(p, slowed.view(), by(0.1)) == sampled_lengths(p, more, by(0.1)));
}

TEST_CASE("quantiles are those of the sorted values, straight in between, and rise") {
  std::vector<double> const v{4, 1, 3, 2};
  CHECK(quantile(v, 0) == 1);
  CHECK(quantile(v, 0.5) == 2.5);
  CHECK(quantile(v, 0.9) == doctest::Approx(3.7));
  CHECK(quantile(v, 1) == 4);
  CHECK(quantile({7}, 0.9) == 7);
  std::vector<double> const drawn = sampled_lengths(expand(catalogue::one_f_one_b, {3, 6, 0}), costs{}, by(0.2, 40));
  double before = 0;
  for (int k = 0; k <= 20; ++k) {
    double const now = quantile(drawn, k / 20.0);
    CHECK(now >= before);
    before = now;
  }
}

TEST_CASE("the difference of two plans is paired: what both meet does not count") {
  std::vector<double> a, b, same;
  for (int i = 0; i < 200; ++i) {
    a.push_back(1000 + 37 * (i * i % 101));
    b.push_back(a.back() + 5 + i % 3);
    same.push_back(a.back() + (i * 7 % 200 - 99.5) / 10);
  }
  auto const none = difference(a, a);
  CHECK((none.by == 0 && none.error == 0 && !none.clear()));
  auto const some = difference(b, a);
  CHECK(some.by == doctest::Approx(6).epsilon(0.2));
  CHECK((some.error < 1 && some.clear() && !some.below() && difference(a, b).below()));
  CHECK_FALSE(difference(same, a).clear());
  // Of unpaired draws the error would be that of the 90th percentile itself, some hundreds.
  std::vector<double> turned(a.rbegin(), a.rend());
  CHECK(difference(turned, a).error > 20 * some.error);
}

TEST_CASE("a search under jitter is lawful, the same again, and never above the catalogue's best at p90") {
  int drawn = 0, kept = 0, ended_early = 0;
  for (int c = 0; c < 5; ++c) {
    search::effort const little{.trials = c == 4 ? 1 : 20000, .seed = 3};
    stage_costs<6> priced = c == 4 ? stage_costs<6>{} : uneven();  // at equal costs ZB-V cannot be beaten
    for (int s = 0; s < 6 && c == 4; ++s) priced.forward[s] = priced.backward_input[s] = priced.backward_weight[s] = 1;
    activation_limit const memory{c == 1 ? 4.0 : c == 2 ? 3.0 : 0.0};
    work_graph const work = c == 3 ? work_graph::full_backward : work_graph::split_backward;
    search::jitter const how = by(c == 4 ? 0.5 : c == 2 ? 0.2 : 0.05, 60, c == 1 ? 2 : 1);
    search::problem const asked{.where = placed_on(placement::vee, {3, 7, 2}), .costs = priced, .memory = memory, .work = work};
    auto const look = [&] { return search::find_robust(asked, how, little); };
    auto const found = look();
    REQUIRE_FALSE(check(found.best));
    CHECK(found.length == makespan(found.best, priced));
    CHECK(found.best_drawn == sampled_lengths(found.best, priced, how));
    if (memory.most > 0) CHECK(peak_in_flight(found.best) <= memory.most);
    double best = 1e300;
    catalogue::for_each([&](auto const& one) {
      plan const p = expand(one, {3, 7, 2});
      if (p.problem || p.forward_only || p.stages != 6 || p.rank_of.data[5] != 0) return;
      for (int i = 0; i < p.actions.count && c == 3; ++i) {
        if (p.actions.data[i].kind == kind::backward_weight) return;
      }
      if (memory.most > 0 && peak_in_flight(p) > memory.most) return;
      best = std::min(best, quantile(sampled_lengths(p, priced, how), 0.9));
    });
    double const p90 = quantile(found.best_drawn, 0.9);
    CHECK(p90 <= best);
    CHECK((found.kept ? p90 == best : !(best < 1e300) || difference(found.best_drawn, found.published_drawn).below()));
    drawn += found.drawn ? 1 : 0;
    kept += found.kept ? 1 : 0;
    CHECK(show::csv(look().best) == show::csv(found.best));
    // Ended at any time, it is judged all the same.
    for (long after : {0L, 100L, 3000L}) {
      search::effort ended = little;
      ended.watch = {[](search::progress const&, void* left) { return --*static_cast<long*>(left) < 0; }, &after};
      auto const some = search::find_robust(asked, how, ended);
      REQUIRE_FALSE(check(some.best));
      ended_early += after < 0 ? 1 : 0;
      CHECK(quantile(some.best_drawn, 0.9) <= best);
      CHECK(some.published_drawn == found.published_drawn);
    }
  }
  CHECK(drawn > 0);
  CHECK(kept > 0);
  CHECK(ended_early > 5);
  CHECK(search::find_robust({.where = placed_on(placement::vee, {3, 7, 2}), .costs = uneven(), .memory = {1}}, by(0.05))
            .best.problem);
}
