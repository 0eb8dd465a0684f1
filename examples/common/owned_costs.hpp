#pragma once

#include <vector>

#include <chevron/plan/costs.hpp>

/// Costs that own their memory: one entry a stage, and one a boundary between stages.
struct owned_costs {
  std::vector<double> forward, backward_input, backward_weight, communication;
  std::vector<double> latency{};    ///< empty: none
  std::vector<double> recompute{};  ///< empty: as much as forward
  double hidden = 0;
  chevron::occupies communication_occupies = chevron::occupies::nobody;
  bool first_input_gradient = true;
  std::vector<double> computation_factors{}, transfer_factors{};  ///< by microbatch; empty: all are alike

  chevron::cost_view view() const {
    bool const late = !latency.empty(), again = !recompute.empty();
    return {.forward = forward.data(),
            .backward_input = backward_input.data(),
            .backward_weight = backward_weight.data(),
            .stride = 1,
            .communication = communication.data(),
            .communication_stride = 1,
            .hidden = hidden,
            .communication_occupies = communication_occupies,
            .first_input_gradient = first_input_gradient,
            .latency = late ? latency.data() : &chevron::no_time,
            .latency_stride = late ? 1 : 0,
            .lengths = {computation_factors.data(), transfer_factors.data(), static_cast<int>(computation_factors.size())},
            .recompute = again ? recompute.data() : &chevron::no_time,
            .recompute_stride = again ? 1 : 0};
  }
};
