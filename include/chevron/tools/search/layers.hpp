#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <chevron/plan/profile.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/search/problem/effort.hpp>

/// \file
/// Searches for the number of layers of each stage, together with the order.

namespace chevron::search {

/// The numbers of layers found for the stages, and the order found for them.
struct layers_found : found {
  std::vector<int> layers;      ///< by stage: number of layers
  double even = 0;              ///< the length found if layers are divided as evenly as possible
  int held = 0;                 ///< the most layers in flight on a rank, summed over its chunks in flight
  int even_held = 0;            ///< the most layers in flight on a rank with the even division
  int searched = 0;             ///< number of divisions that were searched thoroughly
  bool nothing_better = false;  ///< every other division was searched thoroughly, or its bound is not below the result

  /// Whether a further round is of no use: there is a problem, no division is better, or the watcher stopped the search.
  bool settled() const { return best.problem || stopped || (nothing_better && optimal()); }
  /// Takes the result of a further round, `next`, if `next` is shorter; merges `even`, `nothing_better` and `stopped`, and sums
  /// the trials.
  void add(layers_found&& next) {
    bool const ended = next.stopped;
    std::int64_t const all_trials = trials + next.trials;
    if (!next.best.problem) {
      double const least_even = std::min(even, next.even);
      bool const all = nothing_better || next.nothing_better;
      if (next.length < length * (1 - 1e-12)) *this = std::move(next);
      even = least_even;
      nothing_better = all;
    }
    stopped = ended;
    trials = all_trials;
  }
};

namespace detail {

/// The most layers in flight on a rank: the sum over its chunks in flight.
inline int most_layers_held(plan_view const& plan, std::vector<int> const& layers) {
  std::vector<std::int64_t> const each(layers.begin(), layers.end());
  return static_cast<int>(peak_bytes(plan, {each.data(), nullptr, 1}));
}

/// Divisions of layers ("cuts"), most promising first: by the bound on their length, then by how evenly ranks are loaded.
class promising_cuts {
 public:
  static constexpr std::size_t most_looked_at = 20000;
  struct candidate {
    double bound, unevenness;
    std::vector<int> layers;
    bool operator<(candidate const& other) const {
      if (bound != other.bound) return bound < other.bound;
      if (unevenness != other.unevenness) return unevenness < other.unevenness;
      return layers < other.layers;
    }
  };

  /// \param allowed whether a cut may keep the search's limit; the others come last, with an infinite bound
  template <class Allowed>
  promising_cuts(layer_costs const& costs, problem const& asked, Allowed const& allowed)
      : costs_(costs), placed_(asked.where), memory_(asked.memory), goal_(asked.goal), allowed_(allowed) {
    int const layers = static_cast<int>(costs.layers.size());
    // The first and the last stage may be without layers.
    int const spare = layers - std::max(placed_.stages - 2, 0);
    double ways = 1;  // number of ways to divide `spare` layers among all stages
    for (int k = 1; k < placed_.stages; ++k) ways = ways * (spare + k) / k;
    complete_ = ways <= static_cast<double>(most_looked_at);
    if (complete_) {
      std::vector<int> cut;
      all(cut, layers);
    } else {
      descend(even_layers(layers, placed_.stages));
      descend(one_by_one(layers));
    }
    std::sort(candidates_.begin(), candidates_.end());
  }

  std::vector<candidate> const& candidates() const { return candidates_; }
  /// Whether the list contains all possible cuts.
  bool complete() const { return complete_; }

 private:
  int least(int stage) const { return stage == 0 || stage + 1 == placed_.stages ? 0 : 1; }

  candidate rated(std::vector<int> cut) const {
    owned_costs const costs = costs_.of(cut);
    lower_bounds const least = bounds(placed_, costs.view(), memory_);
    std::vector<double> load(static_cast<std::size_t>(placed_.size.ranks));
    for (std::size_t s = 0; s < cut.size(); ++s)
      load[static_cast<std::size_t>(placed_.rank_of_stage(static_cast<int>(s)))] +=
          costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s];
    double squares = 0;
    for (double const one : load) squares += one * one;
    double const bound = goal_ == objective::makespan ? least.makespan : least.span;
    return {allowed_(cut) ? bound : std::numeric_limits<double>::infinity(), squares, std::move(cut)};
  }

  void all(std::vector<int>& cut, int left) {
    int const stage = static_cast<int>(cut.size());
    if (stage + 1 == placed_.stages) {
      if (left < least(stage)) return;
      cut.push_back(left);
      candidates_.push_back(rated(cut));
      cut.pop_back();
      return;
    }
    for (int count = least(stage); count <= left; ++count) {
      cut.push_back(count);
      all(cut, left - count);
      cut.pop_back();
    }
  }

  /// Moves one layer from one stage to another as long as that gives a more promising cut.
  void descend(std::vector<int> const& start) {
    candidate best = rated(start);
    note(best);
    for (bool moved = true; moved && seen_.size() < most_looked_at;) {
      moved = false;
      candidate const from = best;
      for (std::size_t a = 0; a < from.layers.size(); ++a) {
        if (from.layers[a] <= least(static_cast<int>(a))) continue;
        for (std::size_t b = 0; b < from.layers.size(); ++b) {
          if (a == b) continue;
          std::vector<int> next = from.layers;
          --next[a];
          ++next[b];
          if (seen_.contains(next)) continue;
          candidate one = rated(std::move(next));
          note(one);
          if (one < best) {
            best = std::move(one);
            moved = true;
          }
        }
      }
    }
  }
  void note(candidate const& one) {
    if (seen_.insert(one.layers).second) candidates_.push_back(one);
  }

  /// A cut made by adding one layer after another to the rank with the least work.
  std::vector<int> one_by_one(int layers) const {
    auto const stages = static_cast<std::size_t>(placed_.stages);
    piece_costs mean;
    for (piece_costs const& one : costs_.layers) mean.forward += one.forward + one.backward_input + one.backward_weight;
    double const each = mean.forward / std::max(layers, 1);
    std::vector<double> load(static_cast<std::size_t>(placed_.size.ranks));
    auto const rank = [&](std::size_t s) { return static_cast<std::size_t>(placed_.rank_of_stage(static_cast<int>(s))); };
    auto const sum = [](piece_costs const& p) { return p.forward + p.backward_input + p.backward_weight; };
    load[rank(0)] += sum(costs_.embedding);
    load[rank(stages - 1)] += sum(costs_.head);
    std::vector<int> out(stages);
    for (std::size_t s = 0; s < stages; ++s) {
      out[s] = least(static_cast<int>(s));
      load[rank(s)] += out[s] * each;
      layers -= out[s];
    }
    for (; layers > 0; --layers) {
      std::size_t to = 0;
      for (std::size_t s = 1; s < stages; ++s) {
        if (load[rank(s)] < load[rank(to)] || (rank(s) == rank(to) && out[s] < out[to])) to = s;
      }
      ++out[to];
      load[rank(to)] += each;
    }
    return out;
  }

  layer_costs const& costs_;
  plan_view placed_;
  activation_limit memory_;
  objective goal_;
  std::function<bool(std::vector<int> const&)> allowed_;
  bool complete_ = false;
  std::vector<candidate> candidates_;
  std::set<std::vector<int>> seen_;
};

}  // namespace detail

/// The effort of `find_layers`.
struct layer_effort {
  effort brief{.trials = 1000};  ///< effort of the search on every cut that is considered
  effort thorough{};             ///< effort of the search on the best of these cuts
  int most_looked_at = 48;
  int most_searched = 6;
};

/// Searches for the order of one cut within the problem's limit of chunks.
struct find_in_chunks {
  /// Searches for the schedule of one cut.
  /// \returns the result of `find`
  found operator()(problem const& of_cut, std::vector<int> const& /*layers*/, effort const& how_hard) const {
    return find(of_cut, how_hard);
  }
};

/// Searches for the numbers of layers of the stages (a "cut"), together with an order, that make the step short. Cuts are
/// searched briefly, in the order of their lower bounds, until the next cut's bound is not below the shortest length found. The
/// best of these cuts are then searched thoroughly. A watcher ends the whole search if both efforts name it. Every stage but
/// the first and the last has at least one layer.
///
/// \param costs with an empty `problem`, and at least `stages - 2` layers
/// \param asked the problem; its costs are ignored. With a limit of chunks fewer cuts are considered
/// \param search searches one cut, `found(problem of the cut, std::vector<int> layers of each stage, effort)`: for searches
/// that keep another limit than chunks. If it has a member `allows(layers)`, cuts for which that is false are not searched
/// \returns the best cut and its order; if `search` refuses the problem, `best.problem` says why
template <class Search = find_in_chunks>
layers_found find_layers(layer_costs const& costs, problem const& asked, layer_effort const& how_hard = {},
                         Search const& search = {}) {
  layers_found out;
  if (finding const f = detail::refusal(asked)) {
    static_cast<found&>(out) = detail::refused(asked, f);
    return out;
  }
  std::vector<int> const even = even_layers(static_cast<int>(costs.layers.size()), asked.where.stages);
  bool stopped = false;
  auto const search_on = [&](std::vector<int> const& cut, effort const& trying) {
    owned_costs const of_stages = costs.of(cut);
    found one = search(asked.at(of_stages.view()), cut, trying);
    stopped = stopped || one.stopped;
    if (one.best.problem) one.length = std::numeric_limits<double>::infinity();
    if (!out.layers.empty() && !(one.length < out.length * (1 - 1e-12))) return one.length;
    out.layers = cut;
    static_cast<found&>(out) = std::move(one);
    return out.length;
  };
  out.even = search_on(even, how_hard.thorough);
  out.searched = 1;
  // Where the even cut keeps no limit, another one may: a rank with embedding or head then has fewer layers.
  constexpr bool may_differ = requires { search.allows(even); };
  if (out.best.problem && !may_differ) return out;
  if (!out.best.problem) out.even_held = out.held = detail::most_layers_held(out.best, even);
  if (stopped) return out;
  auto const allowed = [&](std::vector<int> const& cut) {
    if constexpr (may_differ) return search.allows(cut);
    return true;
  };
  detail::promising_cuts const cuts(costs, asked, allowed);

  struct looked_at {
    double length, bound;
    std::vector<int> const* layers;
  };
  std::vector<looked_at> some;
  bool all = cuts.complete();
  for (auto const& next : cuts.candidates()) {
    if (next.bound >= out.length * (1 - 1e-12)) break;
    if (next.layers == even) continue;
    if (stopped || static_cast<int>(some.size()) == how_hard.most_looked_at) {
      all = false;
      break;
    }
    some.push_back({search_on(next.layers, how_hard.brief), next.bound, &next.layers});
  }
  std::stable_sort(some.begin(), some.end(), [](looked_at const& a, looked_at const& b) { return a.length < b.length; });
  for (looked_at const& one : some) {
    if (one.bound >= out.length * (1 - 1e-12)) continue;
    if (stopped || out.searched > how_hard.most_searched) {
      all = false;
      break;
    }
    search_on(*one.layers, how_hard.thorough);
    ++out.searched;
  }
  if (out.best.problem) return out;
  out.held = detail::most_layers_held(out.best, out.layers);
  out.nothing_better = all && !stopped;
  out.stopped = stopped;
  return out;
}

}  // namespace chevron::search
