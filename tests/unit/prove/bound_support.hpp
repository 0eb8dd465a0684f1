#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Costs of all sorts, and the best of all orders of a small pipeline.

namespace chevron::test {

inline constexpr int most_stages = 64;

/// Costs of all sorts: the same for all stages or not, with and without messages and latency, pairs that hide, no first input
/// gradient.
inline stage_costs<most_stages> some_costs(std::mt19937& random) {
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
  out.communication_occupies = static_cast<occupies>(random() % 5);
  double const most_latency = random() % 3 == 0 ? 1 : 0;
  for (double& latency : out.latency) latency = up_to(most_latency);
  out.first_input_gradient = random() % 4 != 0;
  return out;
}

/// Factors of so many microbatches of unequal length, up to four or thirty times the mean; messages need not go with them.
struct some_lengths {
  std::vector<double> computation, transfer;
  double attention = 0;  ///< at times the factors are those of lengths with this share of attention

  some_lengths(std::mt19937& random, int micro_batches) {
    double const spread = random() % 2 == 0 ? 4 : 10;
    auto const factor = [&] { return std::exp2(spread * (static_cast<double>(random()) / 4294967296.0 - .5)); };
    bool const as_long = random() % 2 == 0;
    for (int m = 0; m < micro_batches; ++m) {
      computation.push_back(factor());
      transfer.push_back(as_long ? computation.back() : factor());
    }
    if (random() % 3 != 0) return;
    attention = static_cast<double>(1 + random() % 8) / 8;
    for (std::size_t m = 0; m < computation.size(); ++m) computation[m] = computation_factor(transfer[m], attention);
  }
  cost_view on(cost_view costs) const {
    costs.lengths = {computation.data(), transfer.data(), static_cast<int>(computation.size()), attention};
    return costs;
  }
};

/// The costs of F, I, W and a message that docs/explanation/how-a-search-works.md has in its tables.
inline constexpr costs seven_costs[] = {{10, 10, 10, 0}, {10, 11, 9, .5}, {10, 13, 7, 1}, {20, 18, 12, 2},
                                        {10, 20, 10, 1}, {10, 10, 5, .5}, {12, 14, 10, 1}};

/// A plan with these stages on ranks and room for so many actions, none of which are there yet.
inline plan plan_on(std::vector<int> const& rank_of, int micro_batches, int actions = 0) {
  plan p;
  p.stages = static_cast<int>(rank_of.size());
  p.size = {1 + *std::max_element(rank_of.begin(), rank_of.end()), micro_batches, 0};
  p.rank_of = buffer<std::int16_t>(p.stages);
  for (int s = 0; s < p.stages; ++s) {
    p.rank_of.data[s] = static_cast<std::int16_t>(rank_of[static_cast<std::size_t>(s)]);
    auto const same = std::count(rank_of.begin(), rank_of.end(), rank_of[static_cast<std::size_t>(s)]);
    p.size.chunks = std::max(p.size.chunks, static_cast<int>(same));
  }
  p.begin = buffer<int>(p.size.ranks + 1);
  p.actions = buffer<action>(actions);
  return p;
}

/// The chunks that a rank with one stage holds after so many F, I and W.
inline double held_after(int const (&done)[3], activation_limit memory) {
  return done[0] - (1 - memory.kept_for_weight) * done[1] - memory.kept_for_weight * done[2];
}

/// All orders of one rank with one stage: F, I and W of each microbatch in that order, microbatches in the order given.
inline void all_orders(int stage, std::vector<int> const& given, activation_limit memory, int (&done)[3],
                       std::vector<action>& so_far, std::vector<std::vector<action>>& out) {
  int const micro_batches = static_cast<int>(given.size());
  if (done[2] == micro_batches) return out.push_back(so_far);
  constexpr kind kinds[] = {kind::forward, kind::backward_input, kind::backward_weight};
  for (int k = 0; k < 3; ++k) {
    if (done[k] == (k == 0 ? micro_batches : done[k - 1])) continue;
    if (k == 0 && memory.most > 0 && held_after(done, memory) + 1 > memory.most + 1e-9) continue;
    so_far.push_back(make_action(kinds[k], stage, given[static_cast<std::size_t>(done[k]++)]));
    all_orders(stage, given, memory, done, so_far, out);
    so_far.pop_back();
    --done[k];
  }
}

/// The shortest of all plans with one stage a rank whose ranks have one of these orders each, by makespan and by span.
inline lower_bounds shortest_of(int micro_batches, std::vector<std::vector<std::vector<action>>> const& orders,
                                cost_view const& costs) {
  int const ranks = static_cast<int>(orders.size());
  std::vector<int> in_line(orders.size());
  std::iota(in_line.begin(), in_line.end(), 0);
  plan p = plan_on(in_line, micro_batches, 3 * ranks * micro_batches);
  for (int r = 0; r <= ranks; ++r) p.begin.data[r] = 3 * micro_batches * r;
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

/// The same of all orders in which microbatches go in as given, on every rank and for each kind; none given: in ascending order.
inline lower_bounds shortest(int ranks, int micro_batches, activation_limit memory, cost_view const& costs,
                             std::vector<int> given = {}) {
  for (int m = static_cast<int>(given.size()); m < micro_batches; ++m) given.push_back(m);
  std::vector<std::vector<std::vector<action>>> orders(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    int done[3] = {};
    std::vector<action> so_far;
    all_orders(r, given, memory, done, so_far, orders[static_cast<std::size_t>(r)]);
  }
  return shortest_of(micro_batches, orders, costs);
}
inline lower_bounds shortest(int ranks, int micro_batches, int limit, cost_view const& costs,
                             std::vector<int> const& given = {}) {
  return shortest(ranks, micro_batches, {static_cast<double>(limit), 1}, costs, given);
}

/// The same of all orders whatsoever: each kind on each rank takes microbatches in an order of its own.
inline lower_bounds shortest_of_any_order(int ranks, int micro_batches, activation_limit memory, cost_view const& costs) {
  std::vector<std::vector<std::vector<action>>> orders(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    constexpr kind kinds[] = {kind::forward, kind::backward_input, kind::backward_weight};
    std::vector<int> next(static_cast<std::size_t>(micro_batches), 0);  // kind of each microbatch
    std::vector<action> so_far;
    auto const go_on = [&](auto const& self, int(&done)[3]) -> void {
      if (done[2] == micro_batches) return orders[static_cast<std::size_t>(r)].push_back(so_far);
      for (int m = 0; m < micro_batches; ++m) {
        int& k = next[static_cast<std::size_t>(m)];
        if (k == 3 || (k == 0 && memory.most > 0 && held_after(done, memory) + 1 > memory.most + 1e-9)) continue;
        so_far.push_back(make_action(kinds[k], r, m));
        ++done[k++];
        self(self, done);
        --done[--k];
        so_far.pop_back();
      }
    };
    int done[3] = {};
    go_on(go_on, done);
  }
  return shortest_of(micro_batches, orders, costs);
}

}  // namespace chevron::test
