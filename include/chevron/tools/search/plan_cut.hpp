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
template <class Excess>
class plan_cut_climb {
 public:
  plan_cut_climb(plan_view const& plan, layer_costs const& costs, Excess const& excess, std::int64_t most_actions)
      : plan_(plan), costs_(costs), excess_(excess), left_(most_actions) {}

  plan_cut found(std::vector<int> const& start) {
    plan_cut best = judged(start);
    std::vector<std::size_t> from(start.size()), to(start.size());
    for (bool moved = true; moved && left_ > 0;) {
      moved = false;
      std::vector<double> const load = loads(best.layers);
      auto const rank = [&](std::size_t s) { return static_cast<std::size_t>(plan_.rank_of[s]); };
      std::iota(from.begin(), from.end(), std::size_t{0});
      std::stable_sort(from.begin(), from.end(), [&](std::size_t a, std::size_t b) { return load[rank(a)] > load[rank(b)]; });
      to.assign(from.rbegin(), from.rend());
      for (std::size_t i = 0; i < from.size() && !moved; ++i) {
        std::size_t const a = from[i];
        if (best.layers[a] <= (a == 0 || a + 1 == from.size() ? 0 : 1)) continue;
        for (std::size_t const b : to) {
          if (a == b || left_ <= 0) continue;
          std::vector<int> next = best.layers;
          --next[a];
          ++next[b];
          if (!seen_.insert(next).second) continue;
          // A rank's own work takes at least so long.
          if (best.excess == 0 && busiest(loads(next)) >= best.makespan * (1 - 1e-12)) continue;
          plan_cut one = judged(std::move(next));
          if (one.excess > best.excess || (one.excess == best.excess && !(one.makespan < best.makespan * (1 - 1e-9)))) continue;
          best = std::move(one);
          moved = true;
          break;
        }
      }
    }
    return best;
  }

 private:
  plan_cut judged(std::vector<int> cut) {
    left_ -= plan_.total();
    owned_costs const costs = costs_.of(cut);
    plan_cut out{std::move(cut), makespan(plan_, costs.view()), 0};
    out.excess = excess_(out.layers);
    return out;
  }
  /// Work of each rank in a step.
  std::vector<double> loads(std::vector<int> const& cut) const {
    owned_costs const costs = costs_.of(cut);
    std::vector<double> out(static_cast<std::size_t>(plan_.size.ranks));
    for (std::size_t s = 0; s < cut.size(); ++s) {
      out[static_cast<std::size_t>(plan_.rank_of[s])] +=
          (costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s]) * plan_.size.micro_batches;
    }
    return out;
  }
  static double busiest(std::vector<double> const& load) { return *std::max_element(load.begin(), load.end()); }

  plan_view plan_;
  layer_costs const& costs_;
  Excess const& excess_;
  std::int64_t left_;
  std::set<std::vector<int>> seen_;
};

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
  int const layers = static_cast<int>(costs.layers.size()), stages = plan.stages;
  if (stages > layers + 2) return {};
  detail::plan_cut_climb<Excess> climb(plan, costs, excess, most_actions);
  return climb.found(even_layers(layers, stages));
}

}  // namespace chevron::search
