#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <chevron/prove/check.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/search.hpp>

/// \file
/// A search within a rank's memory in bytes.

namespace plan_program {

/// Whether no rank of a plan holds more than so many bytes at any time.
inline bool fits(chevron::plan_view const& plan, chevron::footprint_view const& takes, std::int64_t memory) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (chevron::peak_memory(plan, takes, r) > memory) return false;
  }
  return true;
}

/// The same plan, but an F that is too much for its rank's memory waits for room, and later Fs of that rank behind it.
/// \returns a plan that passes `check` and fits; nothing where an F would have to wait for its own backward, or ranks for each other
std::optional<chevron::plan> brought_within(chevron::plan_view const& plan, chevron::footprint_view const& takes,
                                            std::int64_t memory);

/// Bytes of memory as chunks in flight, the unit in which `search::find` counts.
struct chunk_range {
  int safe = 0;              ///< whatever order keeps this limit fits
  int last = 0;              ///< whatever order fits keeps this limit
  double most_kept = 0;      ///< share of a chunk that its W needs, at most
  double least_kept = 1;     ///< and at least
};

/// \param placed any plan with the stages on their ranks
chunk_range chunks_within(chevron::plan_view const& placed, chevron::footprint_view const& takes, std::int64_t memory);

/// Looks for the shortest schedule that takes no more than so many bytes on any rank: first within the chunks that surely fit, then
/// limit by limit above, where plans are counted in bytes, rank by rank, until several limits bring nothing shorter that fits. Plans
/// of the catalogue take part as they are.
///
/// \param takes bytes by stage; recomputed stages cost their F again in `costs` already
/// \param known_length a length that is known to fit, 0: none; higher limits are tried only where something shorter than it may exist
/// \returns as `search::find`; `bound` holds for every schedule that fits
template <chevron::placement_policy Placement>
chevron::search::found find_within(Placement const& where, chevron::shape size, chevron::cost_view const& costs,
                                   chevron::footprint_view const& takes, std::int64_t memory, chevron::search::objective goal,
                                   chevron::search::effort const& effort, chevron::work_graph work, double known_length = 0) {
  using namespace chevron;
  return search::detail::search_on<search::found>(where, size, [&](plan const& placed) {
    bool const split = work == work_graph::split_backward;
    chunk_range const range = chunks_within(placed, takes, memory);
    int const all = size.micro_batches * size.chunks, least = least_in_flight(placed);
    search::found out;
    search::detail::unsplit_costs const whole(placed, costs);
    activation_limit const widest{static_cast<double>(std::clamp(range.last, least, all)), split ? range.least_kept : 1};
    lower_bounds const bound = bounds(placed, split ? costs : whole.view(costs), widest);
    out.bound = goal == search::objective::makespan ? bound.makespan : bound.span;
    auto const take = [&](plan made, plan_name start) {
      double const length = search::length_of(goal, made, costs);
      if (out.length > 0 && length >= out.length * (1 - 1e-12)) return false;
      out.length = length;
      out.start = start;
      out.best = std::move(made);
      return true;
    };
    search::detail::starting_point known(placed, costs, {}, goal, split);
    catalogue::for_each([&](auto const& one) {
      plan made = search::detail::to_begin_with(expand(one, size), costs);
      if (!known.consider(made, made.name) || !fits(made, takes, memory)) return;
      double const length = known.length_of(made);
      if (out.published_length > 0 && known.better(out.published, out.published_length, made, length)) return;
      out.published_length = length;
      out.published = copy_of(made);
    });
    if (out.published_length > 0) take(copy_of(out.published), out.published.name);

    constexpr int most_misses = 3;
    finding refused{};
    int misses = 0;
    for (int limit = std::clamp(range.safe, least, all); limit <= std::min(range.last, all) && misses < most_misses;
         limit += std::max(limit / 16, 1)) {
      if (out.optimal() && out.length > 0) break;
      activation_limit const chunks{static_cast<double>(limit), split ? range.most_kept : 1};
      search::found next = search::find(where, size, costs, chunks, goal, effort, work);
      out.trials += next.trials;
      out.stopped = next.stopped;
      bool shorter = false;
      if (next.best.problem) {
        refused = next.best.problem;
      } else if (next.length < out.length * (1 - 1e-12) || out.length == 0) {
        plan_name const start = next.start;
        if (auto made = brought_within(next.best, takes, memory)) shorter = take(std::move(*made), start);
      }
      misses = shorter || out.length == 0 ? 0 : misses + 1;
      bool const slower = known_length > 0 && out.length > 0 && out.bound >= known_length;
      if (out.stopped || slower) break;
    }
    if (out.length == 0) {
      finding f = refused;
      if (!f) {
        f.broken = law::description;
        f.words = "no order was found that fits into a rank's memory; stages: ";
        f.number = placed.stages;
      }
      out.best = chevron::detail::refused(size, "searched", f);
      return out;
    }
    search::detail::finish(out.best, {});
    return out;
  });
}

}  // namespace plan_program
