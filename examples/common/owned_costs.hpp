#pragma once

#include <vector>

#include <chevron/plan/costs.hpp>

/// Costs that own their memory: one entry a stage, and one a boundary between stages.
struct owned_costs {
  std::vector<double> forward, backward_input, backward_weight, communication;
  std::vector<double> latency{};  ///< empty: none
  double hidden = 0;
  chevron::occupies communication_occupies = chevron::occupies::nobody;
  bool first_input_gradient = true;
  std::vector<double> computation_factors{}, transfer_factors{};  ///< by microbatch; empty: all are alike

  chevron::cost_view view() const {
    bool const any = !latency.empty();
    return {forward.data(),
            backward_input.data(),
            backward_weight.data(),
            1,
            communication.data(),
            1,
            hidden,
            communication_occupies,
            first_input_gradient,
            any ? latency.data() : &chevron::no_time,
            any ? 1 : 0,
            {computation_factors.data(), transfer_factors.data(), static_cast<int>(computation_factors.size())}};
  }
};
