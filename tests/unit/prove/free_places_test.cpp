// The memory that no order can use, compared with the best of all orders of one rank, which dynamic programming finds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/bounds/free_places.hpp>

#include "bound_support.hpp"

using namespace chevron;
using namespace chevron::test;

namespace {

/// A rank with some stages, and the memory that each of its orders loses.
struct one_rank {
  plan shape;                 // of which rank 0 is looked at
  std::vector<int> stages;    // of rank 0, in the order of a microbatch
  std::vector<bool> is_turn;  // by index into `stages`: the next one follows without a message
  stage_costs<most_stages> costs;
  int micro_batches, places;

  one_rank(std::vector<int> const& rank_of, int micro_batches, int places, stage_costs<most_stages> const& costs)
      : shape(plan_on(rank_of, micro_batches)), costs(costs), micro_batches(micro_batches), places(places) {
    for (int s = 0; s < shape.stages; ++s) {
      if (rank_of[s] != 0) continue;
      stages.push_back(s);
      is_turn.push_back(s + 1 < shape.stages && rank_of[s + 1] == 0);
    }
  }

  struct least {
    double step;         // places times time that are lost in a step
    double until_input;  // the same less places times the time in which W run after the last I
  };

  /// By all orders: a state is how many F, I and W of each stage are done, since microbatches that are alike may ascend.
  least by_all_orders() const {
    int const count = static_cast<int>(stages.size());
    int const kinds = 3 * count;
    int states = 1;
    for (int i = 0; i < kinds; ++i) states *= micro_batches + 1;
    std::vector<least> best(states, {1e300, 1e300});
    best[0] = {0, 0};
    std::vector<int> done(kinds);
    auto const f = [&](int s) -> int& { return done[s]; };
    auto const i = [&](int s) -> int& { return done[count + s]; };
    auto const w = [&](int s) -> int& { return done[2 * count + s]; };
    for (int state = 0; state + 1 < states; ++state) {  // every action leads to a larger number
      if (best[state].step > 1e299) continue;
      for (int k = 0, rest = state; k < kinds; ++k, rest /= micro_batches + 1) done[k] = rest % (micro_batches + 1);
      int held = 0, waits_for_weight = 0, inputs = 0;
      for (int s = 0; s < count; ++s) {
        held += f(s) - w(s);
        waits_for_weight += i(s) - w(s);
        inputs += i(s);
      }
      for (int k = 0, step = 1; k < kinds; ++k, step *= micro_batches + 1) {
        int const s = k % count;
        bool const forward = k < count, input = !forward && k < 2 * count, weight = k >= 2 * count;
        int const before = forward ? (s == 0 ? micro_batches : f(s - 1)) : weight ? i(s) : s + 1 == count ? f(s) : i(s + 1);
        if (done[k] == before || (forward && held == places)) continue;
        double const takes = forward ? costs.forward[stages[s]]
                             : input ? costs.backward_input[stages[s]]
                                     : costs.backward_weight[stages[s]];
        int lost = places - held - (forward ? 1 : 0) + waits_for_weight - (weight ? 1 : 0);
        for (int at = 0; at + 1 < count; ++at) {
          if (!is_turn[at]) continue;
          lost += f(at) - f(at + 1) - (forward && s == at + 1 ? 1 : 0);
          lost += i(at + 1) - i(at) - (input && s == at ? 1 : 0);
        }
        least& next = best[state + step];
        next.step = std::min(next.step, best[state].step + takes * lost);
        double const after = weight && inputs == count * micro_batches ? takes * places : 0;
        next.until_input = std::min(next.until_input, best[state].until_input + takes * lost - after);
      }
    }
    return best.back();
  }
  least by_formula() const {
    detail::free_places const unused(shape, costs, 0);
    std::vector<double> weights;
    for (int s : stages) weights.insert(weights.end(), micro_batches, costs.backward_weight[s]);
    std::sort(weights.rbegin(), weights.rend());
    double left = 0;
    for (int i = 0; i < places; ++i) left += weights[i];
    double const lost = unused.lost(places, micro_batches);
    return {lost, lost + unused.lost_to_last_weights(places) - places * left};
  }
};

}  // namespace

TEST_CASE("no order of a rank loses less of its memory, and often one loses just that") {
  std::mt19937 random(5);
  int compared = 0, met = 0, met_until_input = 0;
  for (auto const& [rank_of, most_micro_batches] :
       {std::pair{std::vector{0, 1}, 5}, std::pair{std::vector{0, 0}, 4}, std::pair{std::vector{0, 1, 0}, 4},
        std::pair{std::vector{1, 0, 0, 1}, 4}, std::pair{std::vector{0, 0, 0}, 2}, std::pair{std::vector{0, 1, 0, 0}, 2}}) {
    for (int draw = 0; draw < 6; ++draw) {
      stage_costs<most_stages> costs = some_costs(random);
      costs.first_input_gradient = true;
      for (int micro_batches = 1; micro_batches <= most_micro_batches; ++micro_batches) {
        int const stages = static_cast<int>(std::count(rank_of.begin(), rank_of.end(), 0));
        for (int places = stages; places < stages * micro_batches; ++places) {
          one_rank const rank(rank_of, micro_batches, places, costs);
          auto const found = rank.by_all_orders();
          auto const proved = rank.by_formula();
          CAPTURE(rank_of.size());
          CAPTURE(micro_batches);
          CAPTURE(places);
          CHECK(proved.step <= found.step * (1 + 1e-12));
          CHECK(proved.until_input <= found.until_input + 1e-9 * std::abs(found.until_input));
          ++compared;
          met += proved.step > found.step * (1 - 1e-9) ? 1 : 0;
          met_until_input += proved.until_input > found.until_input - 1e-9 * std::abs(found.until_input) ? 1 : 0;
        }
      }
    }
  }
  // The bounds are often met: a slightly higher bound would exceed the best order above.
  CHECK(met > compared / 4);
  CHECK(met_until_input > compared / 4);
}

TEST_CASE("a microbatch more in a V with short memory, in closed form") {
  for (int const ranks : {2, 4, 8}) {
    for (costs const& each : seven_costs) {
      for (int const places : {2, 4}) {
        CAPTURE(ranks);
        CAPTURE(places);
        double const held = (2 * ranks + 1) * (each.forward + each.backward_input) + 2 * each.backward_weight +
                            4 * (ranks - 1) * each.communication;
        double const lost = each.forward + each.backward_input + 2 * each.backward_weight;
        double const work = 2 * (each.forward + each.backward_input + each.backward_weight);
        auto const bound = [&](int micro_batches) {
          return bounds(expand(catalogue::zb_v, {ranks, micro_batches}), each, {static_cast<double>(places), 1}).makespan;
        };
        CHECK((bound(512) - bound(256)) / 256 == doctest::Approx(std::max(work, (held + lost) / places)));
      }
    }
  }
}
