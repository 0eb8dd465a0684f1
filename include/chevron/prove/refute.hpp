#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/cases.hpp>
#include <chevron/prove/whole_times.hpp>

/// \file
/// A lower bound by refuting: the longest time that is shown to be too short for every plan.

namespace chevron {

namespace detail {

/// Raises a bound for one pipeline.
class refuter {
 public:
  /// \param work how much may be done, in steps of inner loops
  refuter(plan_view const& placed, cost_view const& costs, activation_limit memory, bool by_span, bool split, double length,
          std::int64_t work)
      : of_(placed, costs, memory, split, length), by_span_(by_span), alike_(costs.lengths.alike()), left_(work) {}

  double raise(double bound, double length) {
    whole_time const found = of_.units(length);
    whole_time low = of_.units(bound), high = found;
    if (!of_.usable) return bound;
    std::int64_t const all = left_;
    // What is just shorter than what was found goes first: often nothing is. If that takes too long, it is halfway from then on.
    bool halfway = false;
    while (left_ > 0 && low < high && (!halfway || high - low > found / 4096)) {
      whole_time const deadline = halfway ? low + (high - low) / 2 : high - 1 - (high == found ? of_.rounding : 0);
      std::int64_t work = std::min(left_, halfway ? all / 12 : all / 2);
      left_ -= work;
      verdict const came_out = judge(deadline, work);
      left_ += std::max<std::int64_t>(work, 0);
      if (came_out == verdict::refuted) {
        low = deadline + 1;
        if (!halfway) break;
      } else {
        halfway = halfway || came_out == verdict::unknown;
        high = came_out == verdict::met ? shortest_ : deadline;
      }
    }
    double const proved = of_.time_of(low - of_.rounding);
    if (proved >= length * (1 - 1e-12)) return length;
    return std::max(proved, bound);
  }

 private:
  verdict judge(whole_time deadline, std::int64_t& work) {
    // When a rank begins is when its first input arrives: that of the first microbatch, or if they may be exchanged, of any. By
    // span that counts, so each way to begin is a case.
    std::vector<int> arrives(of_.at(of_.ranks), 0);
    while (true) {
      whole_times now = of_;
      for (int r = 0; r < of_.ranks; ++r) {
        if (arrives[of_.at(r)] > 0) now.begin_with(of_.first_stage[of_.at(r)], arrives[of_.at(r)]);
      }
      if (by_span_) now.connect();
      cases all(now, by_span_, work);
      verdict const came_out = all.look(deadline);
      shortest_ = all.shortest();
      if (came_out != verdict::refuted || !by_span_ || !alike_) return came_out;
      int r = 0;
      for (; r < of_.ranks; ++r) {
        int& one = arrives[of_.at(r)];
        if (of_.first_stage[of_.at(r)] <= 0) continue;
        if (++one < of_.micro_batches) break;
        one = 0;
      }
      if (r == of_.ranks) return verdict::refuted;
    }
  }

  whole_times of_;
  bool by_span_, alike_;
  std::int64_t left_;
  whole_time shortest_ = 0;
};

/// What a bound is worth: a tenth of a second for small pipelines, a hundredth for large ones.
constexpr std::int64_t usual_refutation(int actions) { return actions <= 200 ? 100'000'000 : 10'000'000; }

/// With more actions than this writing down what must come before what costs more than it brings.
inline constexpr int most_refuted = 100'000;

}  // namespace detail

/// A bound that is at least as high as one that is known: times that are shown to be too short for every plan raise it. For each such
/// time all orders are gone through, case by case (`prove/cases.hpp`), within windows that heads and tails leave (`prove/windows.hpp`),
/// where microbatches of a stage and kind ascend. If they are alike, that loses nothing: in any plan they can be renamed. If they are not,
/// the bound is one for plans that take them as they are given.
///
/// Where a plan may do what these cases do not know, the bound stays: fused pairs that hide something, evaluation, and, by span, transfers
/// that occupy something. By makespan such transfers count as delays. Bounds by refuting are Martin & Shmoys's (1996).
///
/// \param placed any plan with the stages on their ranks
/// \param split whether backwards are split into I and W; if not, costs are those of `search`: a B is an I without a W
/// \param bound what is known, in the costs' unit
/// \param length of a plan: the bound is raised up to this at most, and equal to it if no plan is shorter
/// \param work steps of inner loops, of which some 10^9 take a second; 0: as is usual
inline double raised_bound(plan_view const& placed, cost_view const& costs, activation_limit memory, bool by_span, bool split,
                           double bound, double length, std::int64_t work = 0) {
  if (placed.forward_only || costs.hidden > 0 || !(bound > 0) || !(length > bound * (1 + 1e-12))) return bound;
  if (by_span && costs.communication_occupies != occupies::nobody) return bound;
  int const actions = placed.stages * placed.size.micro_batches * (split ? 3 : 2);
  if (actions > detail::most_refuted) return bound;
  if (work == 0) work = detail::usual_refutation(actions);
  return detail::refuter(placed, costs, memory, by_span, split, length, work).raise(bound, length);
}

}  // namespace chevron
