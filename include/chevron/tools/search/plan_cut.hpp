#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/sliced_layer_costs.hpp>

/// \file
/// Searches for the numbers of layers of the stages of a given plan.

namespace chevron::search {

/// The numbers of layers found for the stages of a plan ("cut").
struct plan_cut {
  std::vector<int> layers;  ///< by stage; empty: the plan has more stages than the model has pieces
  double makespan = 0;      ///< of the plan with this cut
  std::int64_t excess = 0;  ///< bytes above the memory of the fullest rank; 0: the plan fits
};

/// For `cut_for`: every cut fits.
struct no_excess {
  /// Returns 0 bytes, whatever the cut.
  constexpr std::int64_t operator()(std::vector<int> const& /*layers*/) const { return 0; }
};

namespace detail {

/// Climbs from cut to cut by moving one layer from a stage to another, as long as the plan's excess, or with the same excess its
/// makespan, falls.
/// \tparam Makespan `double(std::vector<int> layers of each stage)`
template <class Makespan, class Excess>
class plan_cut_climb {
 public:
  plan_cut_climb(plan_view const& plan, layer_costs const& costs, Makespan const& makespan, Excess const& excess,
                 std::int64_t most_actions)
      : plan_(plan),
        costs_(costs),
        makespan_of_(makespan),
        excess_(excess),
        left_(most_actions),
        work_{0},
        load_(static_cast<std::size_t>(plan.size.ranks)) {
    for (piece_costs const& one : costs.layers) work_.push_back(work_.back() + work_of(one));
  }

  plan_cut found(std::vector<int> const& start) {
    plan_cut best{start, makespan_of_(start), excess_(start)};
    left_ -= plan_.total();
    std::vector<std::size_t> from(start.size()), to(start.size());
    for (bool moved = true; moved && left_ > 0;) {
      moved = false;
      std::vector<double> const load = loads(best.layers);
      auto const rank = [&](std::size_t s) { return static_cast<std::size_t>(plan_.rank_of[s]); };
      std::iota(from.begin(), from.end(), std::size_t{0});
      std::stable_sort(from.begin(), from.end(), [&](std::size_t a, std::size_t b) { return load[rank(a)] > load[rank(b)]; });
      to.assign(from.rbegin(), from.rend());
      plan_cut next = best;
      for (std::size_t i = 0; i < from.size() && !moved; ++i) {
        std::size_t const a = from[i];
        if (best.layers[a] <= (a == 0 || a + 1 == from.size() ? 0 : 1)) continue;
        --next.layers[a];
        for (std::size_t const b : to) {
          if (a == b || left_ <= 0) continue;
          ++next.layers[b];
          // A rank's own work takes at least so long.
          bool const hopeless = best.excess == 0 && busiest(loads(next.layers)) >= best.makespan * (1 - 1e-12);
          moved = !hopeless && seen_.insert(next.layers).second && improves(next, best);
          if (moved) break;
          --next.layers[b];
        }
        if (!moved) ++next.layers[a];
      }
      if (moved) best = std::move(next);
    }
    return best;
  }

 private:
  /// Whether a cut exceeds the memory by less than the best one, or by as much and has a shorter makespan. Computes both numbers
  /// only as far as the answer needs them.
  bool improves(plan_cut& next, plan_cut const& best) {
    left_ -= plan_.total();
    auto const shorter = [&] {
      next.makespan = makespan_of_(next.layers);
      return next.makespan < best.makespan * (1 - 1e-9);
    };
    if (best.excess == 0) return shorter() && (next.excess = excess_(next.layers)) == 0;
    next.excess = excess_(next.layers);
    if (next.excess != best.excess) {
      if (next.excess < best.excess) next.makespan = makespan_of_(next.layers);
      return next.excess < best.excess;
    }
    return shorter();
  }
  static double work_of(piece_costs const& one) { return one.forward + one.backward_input + one.backward_weight; }
  /// Work of each rank in a step.
  std::vector<double> const& loads(std::vector<int> const& cut) {
    std::fill(load_.begin(), load_.end(), 0);
    std::size_t next = 0;
    for (std::size_t s = 0; s < cut.size(); ++s) {
      std::size_t const end = next + static_cast<std::size_t>(cut[s]);
      double work = work_[end] - work_[next];
      if (s == 0) work += work_of(costs_.embedding) + std::max(costs_.first_input, 0.0);
      if (s + 1 == cut.size()) work += work_of(costs_.head);
      load_[static_cast<std::size_t>(plan_.rank_of[s])] += work * plan_.size.micro_batches;
      next = end;
    }
    return load_;
  }
  static double busiest(std::vector<double> const& load) { return *std::max_element(load.begin(), load.end()); }

  plan_view plan_;
  layer_costs const& costs_;
  Makespan const& makespan_of_;
  Excess const& excess_;
  std::int64_t left_;
  std::vector<double> work_;  ///< of the layers before each
  std::vector<double> load_;  ///< by rank, of the cut that `loads` saw last
  std::set<std::vector<int>> seen_;
};

/// Climbs from the even cut. \param costs of a whole microbatch
template <class Makespan, class Excess>
plan_cut climb_from_even(plan_view const& plan, layer_costs const& costs, Makespan const& makespan, Excess const& excess,
                         std::int64_t most_actions) {
  int const layers = static_cast<int>(costs.layers.size()), stages = plan.stages;
  if (stages > layers + 2) return {};
  plan_cut_climb<Makespan, Excess> climb(plan, costs, makespan, excess, most_actions);
  return climb.found(even_layers(layers, stages));
}

}  // namespace detail

/// Searches for the numbers of layers of the stages of a plan with which the plan fits into memory and, among those, its makespan
/// is short: climbs from the even cut. Every stage but the first and the last has at least one layer.
/// \param plan  keeps its order of actions, whatever the cut
/// \param costs with an empty `problem`; fused pairs keep all their work
/// \param excess bytes by which a cut exceeds a rank's memory, `std::int64_t(std::vector<int> layers of each stage)`
/// \param most_actions the effort: cuts that are judged, times the plan's actions
/// \returns the best cut found; without layers if the plan has more than two stages more than `costs` has layers
template <class Excess = no_excess>
plan_cut cut_for(plan_view const& plan, layer_costs const& costs, Excess const& excess = {},
                 std::int64_t most_actions = 20'000'000) {
  auto const length = [&](std::vector<int> const& cut) { return makespan(plan, costs.of(cut).view()); };
  return detail::climb_from_even(plan, costs, length, excess, most_actions);
}

/// The same search for a plan of slices. \param costs of as many slices as the plan has
/// \param goal the length that is short, and that the result has as `makespan`
template <class Excess = no_excess>
plan_cut cut_for(plan_view const& plan, sliced_layer_costs const& costs, Excess const& excess = {},
                 std::int64_t most_actions = 20'000'000, objective goal = objective::makespan) {
  auto const length = [&](std::vector<int> const& cut) { return length_of(goal, plan, simulate(plan, costs.of(cut))); };
  return detail::climb_from_even(plan, costs.whole(), length, excess, most_actions);
}

}  // namespace chevron::search
