#pragma once

#include <cstddef>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Costs that own their memory, and functions by which searches, bounds and forecasts change costs.

namespace chevron {

/// Costs with one entry for each stage and for each boundary between stages. Code can fill and change them while compiling and
/// at run time.
struct owned_costs {
  buffer<double> forward{}, backward_input{}, backward_weight{};
  buffer<double> communication{};  ///< at least one entry
  buffer<double> latency{};        ///< empty: messages have no latency
  buffer<double> recompute{};      ///< empty: R takes as long as F
  buffer<double> unshard{};        ///< empty: parameters are not gathered
  double hidden = 0;
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;
  length_factors lengths{};
  double own[own_kinds]{};  ///< the costs of X, Y and Z

  constexpr int stages() const { return forward.count; }

  /// \return a view of these costs, valid as long as this object lives
  constexpr cost_view view() const {
    bool const late = !latency.empty(), again = !recompute.empty();
    return {.forward = forward.data,
            .backward_input = backward_input.data,
            .backward_weight = backward_weight.data,
            .stride = 1,
            .communication = communication.data,
            .communication_stride = 1,
            .hidden = hidden,
            .communication_occupies = communication_occupies,
            .first_input_gradient = first_input_gradient,
            .latency = late ? latency.data : &no_time,
            .latency_stride = late ? 1 : 0,
            .lengths = lengths.view(),
            .recompute = again ? recompute.data : &no_time,
            .recompute_stride = again ? 1 : 0,
            .own = {own[0], own[1], own[2]},
            .unshard = unshard.empty() ? nullptr : unshard.data,
            .unshard_stride = 1};
  }
};

/// Copies costs. \param stages number of stages of the plan; 0: returns an object without entries, for a later assignment
constexpr owned_costs copy_of(cost_view const& from, int stages) {
  int const boundaries = stages > 1 ? stages - 1 : stages;
  auto const listed = [](double const* values, int stride, int count) {
    buffer<double> out(count);
    for (int i = 0; i < count; ++i) out.data[i] = values[i * stride];
    return out;
  };
  return {.forward = listed(from.forward, from.stride, stages),
          .backward_input = listed(from.backward_input, from.stride, stages),
          .backward_weight = listed(from.backward_weight, from.stride, stages),
          .communication = listed(from.communication, stages > 1 ? from.communication_stride : 0, boundaries),
          .latency = listed(from.latency, stages > 1 ? from.latency_stride : 0, boundaries),
          .recompute = listed(from.recompute, from.recompute_stride, stages),
          .unshard = listed(from.unshard, from.unshard_stride, from.unshard != nullptr ? stages : 0),
          .hidden = from.hidden,
          .communication_occupies = from.communication_occupies,
          .first_input_gradient = from.first_input_gradient,
          .lengths = factors_of(from.lengths, from.lengths.count),
          .own = {from.own[0], from.own[1], from.own[2]}};
}

/// Multiplies the times of computations by `computation` and those of transfers by `transfer`, and makes microbatches equally
/// long. Other costs, such as latencies, are unchanged.
constexpr owned_costs scaled(cost_view const& from, int stages, double computation, double transfer) {
  owned_costs out = copy_of(from, stages);
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) {
    for (double& cost : *list) cost *= computation;
  }
  for (double& cost : out.own) cost *= computation;
  for (double& cost : out.communication) cost *= transfer;
  out.lengths = {};
  return out;
}

/// Costs for lower bounds, used if attention gives I and W different factors: no I or W takes longer than with `costs`, and all
/// computations of a microbatch have equal factors. Empty if `costs` have no attention.
constexpr owned_costs with_least_halves(cost_view const& costs, int stages, int micro_batches) {
  if (!(costs.lengths.attention > 0)) return {};
  owned_costs out = copy_of(costs, stages);
  out.lengths.attention = 0;
  auto const least = [&](kind what, int stage) {
    double one = 0;
    for (int m = 0; m < micro_batches; ++m) {
      double const share = costs.of_action(make_action(what, stage, m)) / costs.lengths.of_computation(m);
      one = m == 0 || share < one ? share : one;
    }
    return one;
  };
  for (int s = 0; s < stages; ++s) {
    double const input = least(kind::backward_input, s), weight = least(kind::backward_weight, s);
    // On stage 0 without an input gradient W is the whole backward.
    bool const free_input = s == 0 && !costs.first_input_gradient;
    out.backward_input[s] = free_input ? costs.backward_input[0] : input;
    out.backward_weight[s] = free_input ? costs.backward_weight[0] : weight;
  }
  return out;
}

/// Costs for plans that do not split backwards: I takes as long as B, and W takes 0.
constexpr owned_costs unsplit(cost_view const& from, int stages) {
  owned_costs out = copy_of(from, stages);
  for (int s = 0; s < stages; ++s) {
    out.backward_input[s] += out.backward_weight[s];
    out.backward_weight[s] = 0;
  }
  out.first_input_gradient = true;  // for stage 0, B's cost already leaves out the input gradient
  return out;
}

/// Multiplies the delay of each message, transfer plus latency, by `times`: the transfer takes longer, the latency is
/// unchanged.
constexpr owned_costs with_slower_messages(cost_view const& from, int stages, double times) {
  owned_costs out = copy_of(from, stages);
  for (int s = 0; s + 1 < stages; ++s) out.communication[s] += (times - 1) * from.of_delay(s);
  return out;
}

/// Multiplies the times of each rank's F, B, I, W and R by a factor; other costs are unchanged.
/// \param by one factor for each rank
template <class Factors>
constexpr owned_costs with_slower_ranks(plan_view const& where, cost_view const& from, Factors const& by) {
  owned_costs out = copy_of(from, where.stages);
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) {
    for (int s = 0; s < where.stages; ++s) (*list)[s] *= by[static_cast<std::size_t>(where.rank_of[s])];
  }
  return out;
}

}  // namespace chevron
