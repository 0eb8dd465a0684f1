#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/random.hpp>

/// \file
/// Simulates steps whose computations take random times around their costs, and summarises the steps' lengths: median, 90th
/// percentile, difference of two plans.

namespace chevron::search {

/// The random variation of computation times. Each draw is one step of all replicas.
struct jitter {
  double spread = 0;        ///< standard deviation of a computation's time, as a share of its mean; 0.05 is 5 %
  int replicas = 1;         ///< number of pipelines side by side; a step lasts as long as the slowest replica
  double slow_replica = 1;  ///< factor on computation times of the first of several replicas
  int draws = 200;
  std::uint64_t seed = 1;
};

/// The time of each computation of one pipeline in one draw: its cost times a log-normal factor of mean 1. A factor is drawn
/// for F, I or W of a stage and a microbatch, so two schedules with equal numbers of stages have the same durations whatever
/// their order; a B takes the sum of its I and W. Messages do not vary.
///
/// A factor is exp(s·z - s²/2) with s² = ln(1 + spread²) and, by Box and Muller, z = √(-2 ln(1 - u))·cos(2πv). Here u and v are
/// the first two shares of random numbers seeded with mixed(d + 2^32·kind + 2^16·stage + microbatch), where d is
/// mixed(mixed(seed) + 2^32·draw + replica), mixed(x) the first number after seed x, and kind 0, 1, 2 for F, I, W.
class duration_sample {
 public:
  /// Draws the factors.
  /// \param draw seeds the random numbers, together with `replica`, the number of the pipeline in this draw
  duration_sample(jitter const& how, int stages, int micro_batches, int draw, int replica)
      : stages_(stages), micro_batches_(micro_batches), factor_(static_cast<std::size_t>(3 * stages * micro_batches)) {
    using detail::random_numbers;
    double const variance = std::log1p(how.spread * how.spread);
    double const sigma = std::sqrt(variance);
    double const always = replica == 0 && how.replicas > 1 ? how.slow_replica : 1;
    std::uint64_t const of_draw = random_numbers(random_numbers(how.seed).next() + (static_cast<std::uint64_t>(draw) << 32) +
                                                 static_cast<std::uint64_t>(replica))
                                      .next();
    std::size_t filled = 0;
    for (std::uint64_t what = 0; what < 3; ++what) {
      for (int s = 0; s < stages; ++s) {
        for (int m = 0; m < micro_batches; ++m) {
          if (how.spread == 0) {
            factor_[filled++] = always;
            continue;
          }
          std::uint64_t const cell = (what << 32) + (static_cast<std::uint64_t>(s) << 16) + static_cast<std::uint64_t>(m);
          random_numbers here(random_numbers(of_draw + cell).next());
          double const u = here.share();
          double const z = std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * 3.14159265358979323846 * here.share());
          factor_[filled++] = always * std::exp(sigma * z - variance / 2);
        }
      }
    }
  }

  /// \param what F, I or W
  double factor(kind what, int stage, int micro_batch) const {
    int const k = what == kind::forward ? 0 : what == kind::backward_weight ? 2 : 1;
    return factor_[static_cast<std::size_t>((k * stages_ + stage) * micro_batches_ + micro_batch)];
  }

 private:
  int stages_;
  int micro_batches_;
  std::vector<double> factor_;
};

/// Costs multiplied by the factors of one draw.
struct sampled_costs : cost_view {
  /// \param planned the costs before the draw
  /// \param drawn the factors, which outlive this object
  sampled_costs(cost_view const& planned, duration_sample const& drawn) : cost_view(planned), now(&drawn) {}

  /// The duration of an action in this draw.
  double of_action(action a) const {
    int const s = static_cast<int>(a.stage);
    int const m = static_cast<int>(a.micro_batch);
    auto const drawn = [&](kind what) { return cost_view::of_action(make_action(what, s, m)) * now->factor(what, s, m); };
    return a.kind != kind::backward ? drawn(a.kind) : drawn(gradient_kind(true)) + drawn(kind::backward_weight);
  }
  /// The duration of a fused pair of these actions in this draw.
  double of_pair(action forward_half, action backward_half) const {
    return of_halves(of_action(forward_half), of_action(backward_half));
  }

  duration_sample const* now;
};

/// The timeline of a lawful plan with the times of one draw. Each rank runs its actions in the plan's order.
inline timeline simulate_sampled(plan_view const& plan, sampled_costs const& costs) {
  return chevron::detail::simulate_once(plan, costs);
}

/// The step lengths of a lawful plan, one per draw, in the costs' unit. A step lasts as long as its slowest replica.
inline std::vector<double> sampled_lengths(plan_view const& plan, cost_view const& costs, jitter const& how,
                                           objective goal = objective::makespan) {
  std::vector<double> out;
  for (int draw = 0; draw < how.draws; ++draw) {
    double longest = 0;
    for (int replica = 0; replica < how.replicas; ++replica) {
      duration_sample const now(how, plan.stages, plan.size.units(), draw, replica);
      longest = std::max(longest, length_of(goal, plan, simulate_sampled(plan, {costs, now})));
    }
    out.push_back(longest);
  }
  return out;
}

/// The quantile of the values, with linear interpolation between neighbours, as in NumPy's percentile. \param share from 0 to 1
inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  double const place = share * static_cast<double>(values.size() - 1);
  auto const below = static_cast<std::size_t>(place);
  double const rest = place - static_cast<double>(below);
  return below + 1 < values.size() ? values[below] + rest * (values[below + 1] - values[below]) : values.back();
}

/// The quantile of step lengths by which plans are compared.
inline constexpr double target_percentile = 0.9;

/// Figures of one plan over many draws, in the costs' unit.
struct sampled_figures {
  double median = 0;
  double p90 = 0;     ///< 90th percentile: nine steps of ten are shorter
  double spread = 0;  ///< 90th percentile less 10th percentile

  /// \param lengths one step's length for each draw
  explicit sampled_figures(std::vector<double> const& lengths)
      : median(quantile(lengths, 0.5)),
        p90(quantile(lengths, target_percentile)),
        spread(p90 - quantile(lengths, 1 - target_percentile)) {}
};

/// The difference of two plans' 90th percentiles over the same draws.
struct sampled_difference {
  double by = 0;
  double error = 0;  ///< the standard error of `by`

  /// Whether the difference exceeds two standard errors, which chance alone causes once in twenty times.
  bool clear() const { return std::abs(by) > 2 * error; }
  /// Whether the first plan's percentile is clearly below the second's.
  bool below() const { return by < 0 && clear(); }
};

/// The difference of two plans' 90th percentiles over the same draws. Its standard error is the bootstrap's (Efron, The Annals of
/// Statistics 7(1), 1979): resamples the draws 200 times with replacement, the same draws for both plans.
/// \param mine one length for each draw, of the first plan \param other one length for each draw, of the second plan
inline sampled_difference difference(std::vector<double> const& mine, std::vector<double> const& other) {
  constexpr int times = 200;
  sampled_difference out{quantile(mine, target_percentile) - quantile(other, target_percentile), 0};
  detail::random_numbers random(1);
  std::vector<double> a(mine.size()), b(mine.size());
  double sum = 0, squares = 0;
  for (int k = 0; k < times; ++k) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      auto const taken = static_cast<std::size_t>(random.below(static_cast<int>(a.size())));
      a[i] = mine[taken];
      b[i] = other[taken];
    }
    double const one = quantile(a, target_percentile) - quantile(b, target_percentile) - out.by;
    sum += one;
    squares += one * one;
  }
  out.error = std::sqrt(std::max(0.0, (squares - sum * sum / times) / (times - 1)));
  return out;
}

}  // namespace chevron::search
