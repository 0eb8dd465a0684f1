#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/wires.hpp>

/// \file
/// A part of `bounds`: raises lower bounds to the time that wires need for their messages.

namespace chevron::detail {

/// The times of one wire's messages in a step.
struct wire_load {
  double transfers = 0;  ///< time of all transfers of a step
  double before = 0;     ///< least time before the first transfer can begin
  double behind = 0;     ///< least time after the end of the last transfer

  constexpr void add(double takes, double sooner, double later) {
    before = transfers > 0 && before < sooner ? before : sooner;
    behind = transfers > 0 && behind < later ? behind : later;
    transfers += takes;
  }
  constexpr double length() const { return transfers > 0 ? before + transfers + behind : 0; }
};

/// Raises `makespan` and `span` to the time that each wire needs for its messages, if transfers occupy wires. The makespan's
/// bound counts from the step's start to the end of the actions that depend on the wire's last message. The span's bound is
/// that of the rank with a boundary's earlier stage. For activations it counts from an F before the first send to the I and W
/// for the gradient of the last; for gradients, from an F before the first arrives to the I and W after the last arrives.
/// \param costs costs with the least factors of any microbatch
/// \param each costs with factor 1
/// \param messages sum of the factors of all messages across a boundary
/// \param forward_start, backward_start, after by stage: times of a microbatch that is alone in the pipeline (`unhindered` in
/// lone_microbatch.hpp), with the least factors
constexpr void raise_by_wires(plan_view const& plan, cost_view const& costs, cost_view const& each, double messages,
                              double const* forward_start, double const* backward_start, double const* after, double& makespan,
                              double& span) {
  wires const links(plan, costs);
  if (links.count == 0) return;
  buffer<wire_load> all(links.count, zeroed), forwards(links.count, zeroed), gradients(links.count, zeroed);
  int const last = plan.stages - 1;
  for (int s = 0; s < last; ++s) {
    double const takes = messages * each.of_message(s);
    if (plan.rank_of[s] == plan.rank_of[s + 1] || !(takes > 0)) continue;
    double const latency = costs.of_latency(s);
    double const forward = costs.of(kind::forward, s);
    int const down = links.carrying(s, true);
    if (plan.forward_only) {
      all.data[down].add(takes, forward_start[s] + forward,
                         latency + forward_start[last] + costs.of(kind::forward, last) - forward_start[s + 1]);
      continue;
    }
    int const up = links.carrying(s, false);
    double const input = costs.of_input(s);
    double const input_after = costs.of_input(s + 1);
    double const weight = costs.of(kind::backward_weight, s);
    double const round = latency + backward_start[s + 1] + input_after - forward_start[s + 1];
    all.data[down].add(takes, forward_start[s] + forward, round + after[s + 1]);
    all.data[up].add(takes, backward_start[s + 1] + input_after, latency + input + after[s]);
    forwards.data[down].add(takes, forward, latency + backward_start[s] - forward_start[s + 1] + input + weight);
    gradients.data[up].add(takes, backward_start[s + 1] + input_after - forward_start[s], latency + input + weight);
  }
  for (int w = 0; w < links.count; ++w) {
    double const whole = all.data[w].length();
    makespan = whole > makespan ? whole : makespan;
    for (double const one : {forwards.data[w].length(), gradients.data[w].length()}) span = one > span ? one : span;
  }
}

}  // namespace chevron::detail
