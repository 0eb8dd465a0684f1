#pragma once

#include <cstddef>
#include <vector>

#include <chevron/lower/gathers.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Plays a plan together with the gathers of its stages' parameters, for stages under FSDP.
///
/// A rank runs its gathers one after another, beside its computations. A gather starts once the rank's previous gather and the
/// computation before it in the rank's list have ended; a computation starts once its stage is gathered. PyTorch's runtime has
/// these times on a GPU: UNSHARD makes the process group's stream wait for the stream of computations, on which all earlier
/// computations are, and a computation makes its stream wait for the gather (PyTorch 2.11, `FSDPCommContext::
/// get_all_gather_streams`). A gather and a message do not slow each other down, and freeing takes no time.

namespace chevron {
namespace detail {

/// Costs and a plan's gathers, for `play`. Refers to both.
struct gathered_costs : cost_view {
  /// \param costs `unshard` is the time of a gather
  gathered_costs(cost_view const& costs, gather_plan const& plan) : cost_view(costs), gathers(&plan) {}

  gather_plan const* gathers;

  /// Starts the gathers of a play, each once.
  class gather_queues {
   public:
    gather_queues(gathered_costs const& costs, plan_view const& plan)
        : costs_(costs), next_(static_cast<std::size_t>(plan.size.ranks)), ended_(next_.size()) {}

    /// Starts the gathers before the computation at `position` of a rank, from the time `now` at which the rank is free.
    /// \param whole by stage: receives the end of its gather
    void start(int rank, int position, double now, double* whole) {
      auto const r = static_cast<std::size_t>(rank);
      std::vector<gather_event> const& events = costs_.gathers->of_rank[r];
      for (std::size_t& next = next_[r]; next < events.size() && events[next].position <= position; ++next) {
        gather_event const& one = events[next];
        if (!one.gathers) continue;
        ended_[r] = (ended_[r] > now ? ended_[r] : now) + costs_.unshard[one.stage * costs_.unshard_stride];
        whole[one.stage] = ended_[r];
      }
    }

   private:
    gathered_costs const& costs_;
    std::vector<std::size_t> next_;  // by rank: the first event that is not reached
    std::vector<double> ended_;      // by rank: the end of its last gather
  };
};

}  // namespace detail

/// The timeline of a plan that waits for its gathers. O(actions and gathers).
/// \param costs with `unshard`, the time to gather each stage
/// \param gathers of this plan, from `fewest_gathers`, without a problem
inline timeline simulate(plan_view const& plan, cost_view const& costs, gather_plan const& gathers) {
  return detail::simulate_once(plan, detail::gathered_costs(costs, gathers));
}

/// The number of gathers in a plan, over all ranks.
inline int count_gathers(gather_plan const& of) {
  int out = 0;
  for (std::vector<gather_event> const& events : of.of_rank) {
    for (gather_event const& one : events) out += one.gathers ? 1 : 0;
  }
  return out;
}

}  // namespace chevron
