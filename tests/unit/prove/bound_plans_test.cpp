// Bounds beside plans of any placement, which are made shorter step by step. Nothing here knows how a bound comes about.
// computes: some million plans
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/held.hpp>

#include "bound_support.hpp"

using namespace chevron;
using namespace chevron::test;

namespace {

/// One small pipeline: stages anywhere, costs of all sorts, and so much memory that it matters.
struct small_case {
  plan p;
  stage_costs<most_stages> each;
  activation_limit memory;
  bool whole_backwards = false;
  std::vector<std::vector<action>> order;  // by rank

  explicit small_case(std::mt19937& random) {
    auto const below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    static std::vector<std::vector<int>> const shapes{{0, 1},       {0, 0},       {0, 1, 0},       {0, 1, 1, 0}, {0, 1, 0, 1},
                                                      {1, 0, 0, 1}, {0, 0, 0},    {0, 1, 2, 2, 1, 0}, {0, 1, 2}};
    std::vector<int> const& ranks = shapes[static_cast<std::size_t>(below(static_cast<int>(shapes.size())))];
    int const stages = static_cast<int>(ranks.size());
    int const micro_batches = 1 + below(stages > 4 ? 4 : 5);
    whole_backwards = below(3) == 0;
    p = plan_on(ranks, micro_batches, (whole_backwards ? 2 : 3) * stages * micro_batches);
    int const chunks = p.size.chunks;
    each = some_costs(random);
    each.hidden = below(3) == 0 ? each.hidden : 0;
    if (below(2) == 0) {
      for (int s = 0; s < most_stages; ++s) each.backward_weight[s] = below(4);
    }
    if (below(3) == 0) {
      for (int s = 0; s < most_stages; ++s) {
        each.forward[s] = 2;
        each.backward_input[s] = 0;
      }
    }
    memory.kept_for_weight = below(3) == 0 ? .1 + .2 * below(5) : 1;
    memory.most = chunks + below(2 * chunks + 1) + (below(3) == 0 ? .5 : 0);
    // One microbatch after the other keeps every limit.
    order.resize(static_cast<std::size_t>(p.size.ranks));
    for (int m = 0; m < micro_batches; ++m) {
      auto const add = [&](kind of, int s) { order[static_cast<std::size_t>(ranks[s])].push_back(make_action(of, s, m)); };
      for (int s = 0; s < stages; ++s) add(kind::forward, s);
      for (int s = stages - 1; s >= 0; --s) {
        add(whole_backwards ? kind::backward : kind::backward_input, s);
        if (!whole_backwards) add(kind::backward_weight, s);
      }
    }
  }

  /// Whether a rank may do this: each chunk's actions in turn, within memory, and pairs of an F and a backward of another chunk.
  bool allowed(std::vector<action> const& of) const {
    std::vector<int> done(static_cast<std::size_t>(p.stages * p.size.micro_batches), 0);
    double held = 0;
    for (std::size_t i = 0; i < of.size(); ++i) {
      action const one = of[i];
      int& state = done[static_cast<std::size_t>(one.stage * p.size.micro_batches + one.micro_batch)];
      bool const forward = one.kind == kind::forward, weight = one.kind == kind::backward_weight;
      if (state != (forward ? 0 : weight ? 2 : 1)) return false;
      state = forward ? 1 : 2;
      held += search::detail::held_change(one.kind, memory);
      if (held > memory.most + activation_limit::rounding) return false;
      if (!one.fused) continue;
      bool const pair = forward && i + 1 < of.size() && of[i + 1].kind == kind::backward &&
                        (of[i + 1].stage != one.stage || of[i + 1].micro_batch != one.micro_batch);
      if (!pair) return false;
    }
    return true;
  }
  lower_bounds length(cost_view const& costs) {
    int at = 0;
    for (std::size_t r = 0; r < order.size(); ++r) {
      p.begin.data[r] = at;
      for (action const one : order[r]) p.actions.data[at++] = one;
    }
    p.begin.data[order.size()] = at;
    timeline const when = simulate(p, costs);
    if (!when.complete) return {1e300, 1e300};
    return {makespan(p, when), span(p, when)};
  }
};

}  // namespace

TEST_CASE("no plan of any placement beats the bounds, however it was come by") {
  std::mt19937 random(12);
  int met = 0;
  std::string beaten;
  for (int draw = 0; draw < 20000; ++draw) {
    small_case one(random);
    some_lengths const lengths(random, one.p.size.micro_batches);
    cost_view const costs = draw % 4 == 0 ? lengths.on(one.each) : cost_view(one.each);
    lower_bounds const proved = bounds(one.p, costs, one.memory);
    lower_bounds best = one.length(costs);
    bool const by_span = draw % 3 == 0;
    double current = by_span ? best.span : best.makespan;
    for (int trial = 0; trial < 600; ++trial) {
      auto& of = one.order[random() % one.order.size()];
      std::vector<action> const before = of;
      std::size_t const from = random() % of.size();
      if (one.whole_backwards && random() % 4 == 0) {
        of[from].fused = of[from].kind == kind::forward && !of[from].fused;
      } else {
        action const moved = of[from];
        of.erase(of.begin() + static_cast<std::ptrdiff_t>(from));
        of.insert(of.begin() + static_cast<std::ptrdiff_t>(random() % (of.size() + 1)), moved);
      }
      lower_bounds const now = one.allowed(of) ? one.length(costs) : lower_bounds{1e300, 1e300};
      double const length = by_span ? now.span : now.makespan;
      if (length > current * (1 + .1 * (600 - trial) / 600. * static_cast<double>(random() % 1000) / 1000.)) {
        of = before;
        continue;
      }
      current = length;
      best = {std::min(best.makespan, now.makespan), std::min(best.span, now.span)};
    }
    met += best.makespan <= proved.makespan * (1 + 1e-9) ? 1 : 0;
    if (best.makespan < proved.makespan * (1 - 1e-9) || best.span < proved.span * (1 - 1e-9)) {
      beaten += " " + std::to_string(draw);
    }
  }
  CHECK(beaten == "");
  CHECK(met > 5000);
}
