#pragma once

#include <chevron/plan/action.hpp>

/// \file
/// What actions cost: the unit is the caller's (chunk units, seconds …), the same throughout.

namespace chevron {

/// Costs seen by the analyses: one entry a stage, or one for all (`stride` 0).
struct cost_view {
  double const* forward = nullptr;
  double const* backward_input = nullptr;
  double const* backward_weight = nullptr;
  int stride = 0;
  double communication = 0;  ///< from a producer's end to its consumer's earliest start on another rank
  double hidden = 0;         ///< of the shorter half of a fused pair, the share that the longer half hides: 0 none, 1 all

  /// Cost of one compute action. A full backward costs input plus weight gradient.
  constexpr double of(kind what, int stage) const {
    int const i = stage * stride;
    switch (what) {
      case kind::forward:
        return forward[i];
      case kind::backward:
        return backward_input[i] + backward_weight[i];
      case kind::backward_input:
        return backward_input[i];
      case kind::backward_weight:
        return backward_weight[i];
      default:
        return 0;
    }
  }

  /// Cost of a fused pair.
  constexpr double of_pair(action forward_half, action backward_half) const {
    double const f = of(forward_half.what, static_cast<int>(forward_half.stage));
    double const b = of(backward_half.what, static_cast<int>(backward_half.stage));
    return f + b - hidden * (f < b ? f : b);
  }
};

/// The same cost for every stage, as in the literature. Note that these are costs of *chunks*: a rank with two chunks of
/// cost 1 spends 2 on each microbatch's forward. Communication occupies no rank; it only delays.
struct costs {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double communication = 0;
  double hidden = 0;

  constexpr cost_view view() const { return {&forward, &backward_input, &backward_weight, 0, communication, hidden}; }
  constexpr operator cost_view() const { return view(); }
};

/// A cost per stage, of fixed size, so that it can be a compile-time value: profiles and uneven models.
template <int Stages>
struct stage_costs {
  double forward[Stages]{};
  double backward_input[Stages]{};
  double backward_weight[Stages]{};
  double communication = 0;
  double hidden = 0;

  constexpr cost_view view() const { return {forward, backward_input, backward_weight, 1, communication, hidden}; }
  constexpr operator cost_view() const { return view(); }
};

}  // namespace chevron
