#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <chevron/plan/finding.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Decides when a rank gathers the sharded parameters of its stages and when it frees them (PyTorch's UNSHARD and RESHARD, for
/// stages under FSDP): the fewest gathers for a number of stages that may be gathered at once, each as early as there is room.
///
/// The order of a rank's computations is fixed, so this is paging with known requests: a computation requests the stages that it
/// runs, and those of the next computation, whose gathers then run beside it. Where a gather needs room, the stage whose next
/// request is farthest away is freed. No other choice needs fewer gathers: L. A. Belady, A study of replacement algorithms for a
/// virtual-storage computer, IBM Systems Journal 5(2), 1966; docs/guides/gathers.md has the proof for requests of several stages.
///
/// Then each gather moves forward, and a rank's gathers keep the order of their uses. Gather j (from 0) has room once j + 1 - K
/// stages are freed, with K resident stages; so it starts after the last of these frees, and the first K gathers before the
/// rank's first computation. No placement in this order lets a gather start earlier. A gather of one computation ahead starts
/// no earlier either, so no gather and no computation ends later than with gathers one computation ahead.

namespace chevron {

/// One gather of a stage's parameters, or their freeing.
struct gather_event {
  int position = 0;  ///< in the rank's list, of a computation or of the first half of a fused pair
  int stage = 0;
  bool gathers = false;  ///< true: starts before this computation; false: freed after it
};

/// The gathers of a plan.
struct gather_plan {
  finding problem{};                               ///< a fused pair needs more stages than may be gathered; then no events
  std::vector<std::vector<gather_event>> of_rank;  ///< in the order in which a rank runs them, gathers in that of their uses
};

namespace detail {

/// The computations of a rank, a fused pair as one, with the stages that each needs.
class stage_requests {
 public:
  stage_requests(plan_view const& plan, int rank) {
    int const length = plan.length(rank);
    for (int i = 0; i < length; ++i) {
      action const a = plan.at(rank, i);
      positions_.push_back(i);
      own_.push_back({static_cast<int>(a.stage)});
      if (a.fused == 0 || i + 1 == length) continue;
      int const other = static_cast<int>(plan.at(rank, ++i).stage);
      if (other != own_.back().front()) own_.back().push_back(other);
    }
  }

  int count() const { return static_cast<int>(positions_.size()); }
  int position(int step) const { return positions_[static_cast<std::size_t>(step)]; }
  /// The stages that a step runs.
  std::vector<int> const& own(int step) const { return own_[static_cast<std::size_t>(step)]; }

  /// The stages that must be gathered during a step: its own, and as many of the next step's as fit, in their order.
  std::vector<int> during(int step, int resident) const {
    std::vector<int> all = own(step);
    if (step + 1 == count()) return all;
    for (int const stage : own(step + 1)) {
      if (static_cast<int>(all.size()) < resident && std::find(all.begin(), all.end(), stage) == all.end()) all.push_back(stage);
    }
    return all;
  }

 private:
  std::vector<int> positions_;
  std::vector<std::vector<int>> own_;
};

/// The gathers of one rank.
inline std::vector<gather_event> fewest_gathers(plan_view const& plan, stage_requests const& requests, int resident) {
  std::vector<std::vector<int>> steps_of(static_cast<std::size_t>(plan.stages));  // by stage: the steps that request it
  for (int i = 0; i < requests.count(); ++i) {
    for (int const stage : requests.during(i, resident)) steps_of[static_cast<std::size_t>(stage)].push_back(i);
  }
  std::vector<std::size_t> past(steps_of.size());  // by stage: its requests up to the current step
  auto const next_request = [&](int stage) {
    auto const s = static_cast<std::size_t>(stage);
    return past[s] < steps_of[s].size() ? steps_of[s][past[s]] : requests.count();
  };
  struct freed {
    int step = 0;
    int stage = 0;
  };
  std::vector<int> order;  // the stages in the order in which they are gathered, which is that of their uses
  // In the order of steps, and of one step in the order of decisions: each right after the last computation before the stage's
  // next gather.
  std::vector<freed> frees;
  std::vector<int> gathered;
  auto const free = [&](int stage) {
    auto const s = static_cast<std::size_t>(stage);
    freed const next{steps_of[s][past[s] - 1], stage};
    frees.insert(std::upper_bound(frees.begin(), frees.end(), next, [](freed one, freed other) { return one.step < other.step; }),
                 next);
    gathered.erase(std::find(gathered.begin(), gathered.end(), stage));
  };
  for (int i = 0; i < requests.count(); ++i) {
    std::vector<int> const wanted = requests.during(i, resident);
    std::vector<int> missing;
    for (int const stage : wanted) {
      if (std::find(gathered.begin(), gathered.end(), stage) == gathered.end()) missing.push_back(stage);
    }
    while (gathered.size() + missing.size() > static_cast<std::size_t>(resident)) {
      // A wanted stage's next request is this step, all others' are later.
      free(*std::max_element(gathered.begin(), gathered.end(),
                             [&](int one, int other) { return next_request(one) < next_request(other); }));
    }
    order.insert(order.end(), missing.begin(), missing.end());
    gathered.insert(gathered.end(), missing.begin(), missing.end());
    for (int const stage : wanted) ++past[static_cast<std::size_t>(stage)];
  }
  while (!gathered.empty()) free(gathered.front());

  // Each gather at the first step with room for it; frees of earlier steps come first.
  std::vector<gather_event> out;
  std::size_t done = 0;  // frees in `out`
  auto const free_before = [&](int step) {
    for (; done < frees.size() && frees[done].step < step; ++done)
      out.push_back({requests.position(frees[done].step), frees[done].stage, false});
  };
  auto const room = static_cast<std::size_t>(resident);
  for (std::size_t j = 0; j < order.size(); ++j) {
    int const step = j < room ? 0 : frees[j - room].step + 1;
    free_before(step);
    out.push_back({requests.position(step), order[j], true});
  }
  free_before(requests.count());
  return out;
}

}  // namespace detail

/// The fewest gathers of a proved plan with which each rank computes only with stages that are gathered, and each gather begins
/// a computation before the one that needs it, if `resident` stages have room for both; each as early as `resident` stages allow.
/// A fused pair is one computation. A rank's first computation has none before it.
/// \param plan a plan that keeps all laws
/// \param resident the most stages of a rank that may be gathered at once, at least 1
inline gather_plan fewest_gathers(plan_view const& plan, int resident) {
  gather_plan out;
  for (int r = 0; r < plan.size.ranks; ++r) {
    detail::stage_requests const requests(plan, r);
    for (int i = 0; i < requests.count(); ++i) {
      if (static_cast<int>(requests.own(i).size()) <= resident) continue;
      out.of_rank.clear();
      out.problem = {.broken = law::resident,
                     .rank = r,
                     .position = requests.position(i),
                     .what = plan.at(r, requests.position(i)),
                     .other = plan.at(r, requests.position(i) + 1),
                     .number = -1,
                     .words =
                         " runs as a pair, whose halves need two stages gathered at once. Remedy: at least 2 resident "
                         "stages; the pair's other half is ",
                     .slices = plan.size.slices};
      return out;
    }
    out.of_rank.push_back(detail::fewest_gathers(plan, requests, resident));
  }
  return out;
}

}  // namespace chevron
