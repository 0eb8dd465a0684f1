#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/prove/wires.hpp>

/// \file
/// The critical path of a step: the chain of actions that determines the step's length.

namespace chevron {

/// One action of a critical path.
struct path_step {
  int action = 0;            ///< index into `plan_view::actions`; for a fused pair, of its forward half
  int rank = 0;              ///< the action's rank
  bool by_message = false;   ///< the action waited for another rank's message, not for its own rank's previous action
  double communicating = 0;  ///< time of messages or gathers from the end of the path's previous action to this action's start
};

/// A chain of actions that fills the makespan: each action starts as soon as the previous action of the chain allows, so a
/// delay of any action delays the step's end. The sum of the actions' durations and their `communicating` times is the
/// makespan.
struct critical_path {
  buffer<path_step> steps;  ///< in the order of time; the first `count` entries are used
  int count = 0;

  /// The first step in time.
  constexpr path_step const* begin() const { return steps.data; }
  /// The address after the last step in time.
  constexpr path_step const* end() const { return steps.data + count; }
};

/// Returns the critical path of a plan with the timeline `when`; empty if the timeline is incomplete. O(actions).
///
/// If a message waited for its wire, the path continues with the earlier action whose message found the wire free, and
/// `communicating` includes the transfers of all messages from the earlier message to the one that waited.
///
/// Ties: the path ends at the lowest rank among those that end last. If an action's message arrives at the moment at which the
/// action's rank becomes free, the path continues with the rank's previous action. If both messages of a fused pair arrive at
/// once, the path continues with the forward's.
constexpr critical_path critical_path_of(plan_view const& plan, cost_view const& costs, timeline const& when) {
  critical_path result;
  int const total = plan.total();
  if (!when.complete || total == 0) return result;
  bool const sender = costs.occupies_sender();
  bool const receiver = costs.occupies_receiver();

  step_graph const graph(plan);
  buffer<int> maker_memory(graph.results(), zeroed);  // by result: the action that computes it
  int* const maker = maker_memory.data;
  for (int i = 0; i < total; ++i) {
    if (int const made = graph.makes(plan.actions[i]); made >= 0) maker[made] = i;
  }
  auto const first_of_pair = [&](int i) {
    return i > plan.begin[plan.rank_of[plan.actions[i].stage]] && plan.actions[i - 1].fused != 0 ? i - 1 : i;
  };
  // If transfers occupy wires, by action: the end of its transfer, and the last action up to it whose message found the wire
  // free.
  detail::wires const links(plan, costs);
  buffer<double> left(links.count > 0 ? total : 0);
  buffer<int> queue(links.count > 0 ? total : 0);
  buffer<double> free_from(links.count, zeroed);
  buffer<int> queue_of(links.count);
  for (int i = 0; i < total && links.count > 0; ++i) {
    action const a = plan.actions[i];
    int const boundary = graph.crosses(a);
    if (boundary < 0) continue;
    int const wire = links.carrying(boundary, a.kind == kind::forward);
    double& free = free_from.data[wire];
    bool const finds_it_free = when.end.data[i] >= free;
    if (finds_it_free) queue_of.data[wire] = i;
    queue.data[i] = queue_of.data[wire];
    left.data[i] = free = (finds_it_free ? when.end.data[i] : free) + costs.of_message(boundary, static_cast<int>(a.micro_batch));
  }
  // The time at which a rank has sent all results of its actions up to `i`.
  auto const sent_at = [&](int i) {
    double time = when.end.data[i];
    for (int half = first_of_pair(i); half <= i; ++half) {
      int const boundary = graph.crosses(plan.actions[half]);
      if (boundary >= 0) time += costs.of_message(boundary, static_cast<int>(plan.actions[half].micro_batch));
    }
    return time;
  };

  buffer<double> const whole = detail::whole_from(plan, costs);

  // Begins with the action that ends last, and goes backwards from cause to cause.
  int at = -1;
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const last = plan.begin[r + 1] - 1;
    if (last >= plan.begin[r] && (at < 0 || when.end.data[last] > when.end.data[at])) at = last;
  }
  at = first_of_pair(at);
  buffer<path_step> backwards(total);
  int count = 0;
  while (at >= 0) {
    int const rank = plan.rank_of[plan.actions[at].stage];
    path_step& step = backwards.data[count++] = {at, rank, false, 0};
    // The cause of an action's start is the latest event that it waited for: the arrival of a message, or the end of the rank's
    // previous action and its sends. A rank counts as busy while it receives.
    bool const alone = at == plan.begin[rank];
    int cause = alone ? -1 : first_of_pair(at - 1);
    double there = alone ? 0 : sender ? sent_at(at - 1) : when.end.data[at - 1];
    int const last = last_of_pair(plan.actions, at, plan.begin[rank + 1]);
    for (int half = at; half <= last; ++half) {
      action const a = plan.actions[half];
      int const boundary = graph.comes_over(a);
      if (boundary < 0) continue;
      int const producer = maker[graph.needs(a)];
      double const takes = costs.of_message(boundary, static_cast<int>(a.micro_batch));
      double arrives = links.count > 0 ? left.data[producer] : sender ? sent_at(producer) : when.end.data[producer] + takes;
      if (receiver) arrives -= takes;
      arrives += costs.of_latency(boundary);
      if (arrives > there) {
        there = arrives;
        cause = first_of_pair(links.count > 0 ? queue.data[producer] : producer);
        step.by_message = true;
      }
      if (receiver) there += takes;
    }
    for (int half = at; half <= last && !whole.empty(); ++half) {
      if (whole.data[plan.actions[half].stage] > there) cause = -1;
    }
    step.communicating = when.start.data[at] - (cause >= 0 ? when.end.data[cause] : 0);
    at = cause;
  }
  result.steps = buffer<path_step>(count);
  for (int i = 0; i < count; ++i) result.steps.data[i] = backwards.data[count - 1 - i];
  result.count = count;
  return result;
}

}  // namespace chevron
