#pragma once

#include <cstddef>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Costs that own their memory, and the changes that searches, bounds and forecasts make to costs.

namespace chevron {

/// Costs with one entry a stage and one a boundary between stages. Compilers and programs can fill and change them.
struct owned_costs {
  buffer<double> forward{}, backward_input{}, backward_weight{};
  buffer<double> communication{};  ///< at least one entry
  buffer<double> latency{};        ///< empty: none
  buffer<double> recompute{};      ///< empty: as much as an F
  buffer<double> unshard{};        ///< empty: none
  double hidden = 0;
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;
  buffer<double> computation_factors{}, transfer_factors{};  ///< by microbatch; empty: all are alike
  double attention = 0;                                      ///< as `length_view` has it
  double own[own_kinds]{};                                   ///< of X, Y and Z

  constexpr int stages() const { return forward.count; }

  /// \return costs that point into these, which must outlive them
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
            .lengths = {computation_factors.data, transfer_factors.data, computation_factors.count, attention},
            .recompute = again ? recompute.data : &no_time,
            .recompute_stride = again ? 1 : 0,
            .own = {own[0], own[1], own[2]},
            .unshard = unshard.empty() ? nullptr : unshard.data,
            .unshard_stride = 1};
  }
};

/// A copy of a plan's costs. \param stages of the plan; 0: a value to be assigned to later
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
          .computation_factors = listed(from.lengths.computation, 1, from.lengths.count),
          .transfer_factors = listed(from.lengths.transfer, 1, from.lengths.count),
          .attention = from.lengths.attention,
          .own = {from.own[0], from.own[1], from.own[2]}};
}

/// Costs of a microbatch whose computations and transfers have these factors; microbatches become alike. Latencies stay.
constexpr owned_costs scaled(cost_view const& from, int stages, double computation, double transfer) {
  owned_costs out = copy_of(from, stages);
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) {
    for (double& cost : *list) cost *= computation;
  }
  for (double& cost : out.communication) cost *= transfer;
  out.computation_factors = out.transfer_factors = {};
  out.attention = 0;
  return out;
}

/// Costs at which no I or W takes longer than at these, whose W's have no attention; all have the factors of computations.
constexpr owned_costs with_least_halves(cost_view const& costs, int stages, int micro_batches) {
  if (!(costs.lengths.attention > 0)) return {};
  owned_costs out = copy_of(costs, stages);
  out.attention = 0;
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
    bool const free_input = s == 0 && !costs.first_input_gradient;  // the whole backward is the W's
    out.backward_input[s] = free_input ? costs.backward_input[0] : input;
    out.backward_weight[s] = free_input ? costs.backward_weight[0] : weight;
  }
  return out;
}

/// Costs where no B is split: an I takes as long as the B, and its W nothing.
constexpr owned_costs unsplit(cost_view const& from, int stages) {
  owned_costs out = copy_of(from, stages);
  for (int s = 0; s < stages; ++s) {
    out.backward_input[s] += out.backward_weight[s];
    out.backward_weight[s] = 0;
  }
  out.first_input_gradient = true;  // a B's cost has the part that stage 0 leaves out
  return out;
}

/// Costs whose messages arrive after several times their delay.
constexpr owned_costs with_slower_messages(cost_view const& from, int stages, double times) {
  owned_costs out = copy_of(from, stages);
  for (int s = 0; s + 1 < stages; ++s) out.communication[s] += (times - 1) * from.of_delay(s);
  return out;
}

/// Costs where ranks compute faster or slower than planned; messages stay.
/// \param by factors of the ranks' computations, one entry a rank
template <class Factors>
constexpr owned_costs with_slower_ranks(plan_view const& where, cost_view const& from, Factors const& by) {
  owned_costs out = copy_of(from, where.stages);
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) {
    for (int s = 0; s < where.stages; ++s) (*list)[s] *= by[static_cast<std::size_t>(where.rank_of[s])];
  }
  return out;
}

}  // namespace chevron
