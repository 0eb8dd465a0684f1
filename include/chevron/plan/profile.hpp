#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/footprint.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// What a run was measured to cost, and costs for the planner made of it. As a file: <chevron/plan/profile.hpp>.

namespace chevron {

/// The middle value; 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Measured costs, in milliseconds. What never ran, or crossed no ranks, is `not_measured`.
struct profile {
  static constexpr double not_measured = -1;

  std::string schedule;  ///< under which it was measured; empty: not known
  shape size{};          ///< of that run; 0: not known
  int stages = 0;
  int replicas = 1;
  int steps = 0;        ///< measured; 0: not known
  double pipeline = 0;  ///< first F to last B or W of a replica: the makespan that really was; median; 0: not known
  double step = 0;      ///< all of a step, with gradient sums and optimizer, on a replica's slowest rank; median
  /// One entry a stage, medians. Stage 0's missing input gradient needs no flag: its I is measured to be next to nothing.
  std::vector<double> forward, backward, backward_input, backward_weight;
  std::vector<double> recompute;      ///< of R's, one entry a stage; empty: none ran
  std::vector<double> communication;  ///< one entry a boundary between stages, either direction
  double hidden = not_measured;       ///< of a fused pair's shorter half, the share that the longer half hides: 0 to 1
  std::vector<int> layers;            ///< one entry a stage: how many of the layers that can be moved it holds; empty: not known
  /// Bytes, one entry a stage, or empty where they are not known; each means what it means in `footprint_view`.
  std::vector<std::int64_t> static_bytes, activation_bytes, kept_bytes, input_bytes;
  /// Bytes within `static_bytes`, one entry a stage; empty: not known. The optimizer's state; gradients, but of tied parameters.
  std::vector<std::int64_t> state_bytes, gradient_bytes;
  int shard = 1;  ///< replicas over which that state was cut
};

/// Costs made of a profile, for one number of stages.
struct profiled_costs : owned_costs {
  bool communication_known = false;  ///< false: the profile knows of no boundary, and every message costs 0
  std::string problem;               ///< why the profile does not serve; empty: it does
};

/// Bytes by stage that own their memory.
struct stage_bytes {
  std::vector<std::int64_t> fixed, activation, kept, input;
  std::vector<std::int64_t> gradient;  ///< of `fixed`, those that a replica may share with others; empty: not known
  std::string problem;  ///< why there are none; empty: there are

  /// \param recomputed one entry a stage, or null; it must outlive the view
  footprint_view view(bool const* recomputed = nullptr) const {
    return {fixed.data(), activation.data(), kept.data(), input.data(), recomputed};
  }
};

/// Bytes of a model cut into so many stages, which are neighbours of the profile's put together. What W needs is, where the
/// profile does not say it, all of the activations.
/// \param shard replicas over which the optimizer's state is cut: each holds its share; 0: over as many as when it was measured
inline stage_bytes bytes_of(profile const& measured, int stages, int shard = 0) {
  stage_bytes out;
  char const* const missing = measured.activation_bytes.empty() ? "activation_bytes"
                              : measured.static_bytes.empty() ? "static_bytes"
                              : measured.input_bytes.empty()    ? "input_bytes"
                                                                : nullptr;
  if (missing != nullptr) {
    out.problem = std::string("'") + missing + "' is not there: write one entry for each stage, in bytes, into it";
    return out;
  }
  bool const anew = shard > 0 && shard != measured.shard;
  if (anew && measured.state_bytes.empty()) {
    out.problem =
        "'state_bytes' is not there, so that a share of it is not known: write bytes of the optimizer's state into it, one entry "
        "for each stage";
    return out;
  }
  if (stages == 0 || measured.stages % stages != 0) {
    out.problem = "it has " + std::to_string(measured.stages) + " stages, which do not add up to " + std::to_string(stages);
    return out;
  }
  int const each = measured.stages / stages;
  auto const together = [&](std::vector<std::int64_t> const& list, int s) {
    std::int64_t sum = 0;
    for (int k = s * each; k < (s + 1) * each; ++k) sum += list[static_cast<std::size_t>(k)];
    return sum;
  };
  for (int s = 0; s < stages; ++s) {
    std::int64_t fixed = together(measured.static_bytes, s);
    if (anew) {
      // Rounded up, so that a step that fits by these bytes fits on the device.
      std::int64_t const state = together(measured.state_bytes, s);
      fixed += (state * measured.shard + shard - 1) / shard - state;
    }
    out.fixed.push_back(fixed);
    out.activation.push_back(together(measured.activation_bytes, s));
    out.kept.push_back(together(measured.kept_bytes.empty() ? measured.activation_bytes : measured.kept_bytes, s));
    out.input.push_back(measured.input_bytes[static_cast<std::size_t>(s * each)]);
    if (!measured.gradient_bytes.empty()) out.gradient.push_back(together(measured.gradient_bytes, s));
  }
  return out;
}

/// Which stages of a plan take their backward as I and W.
inline std::vector<bool> split_stages(plan_view const& plan) {
  std::vector<bool> out(static_cast<std::size_t>(plan.stages));
  for (int i = 0; i < plan.total(); ++i) {
    if (leaves_weight(plan.actions[i].kind)) out[plan.actions[i].stage] = true;
  }
  return out;
}

/// Costs for a model cut into as many stages as `split` has entries; true: the stage's I and W are asked for one by one. A
/// profile of k times as many stages serves too: k neighbours cost what they cost together. A boundary that was not measured (its
/// stages stood on one rank) is taken to be like the median of the others.
inline profiled_costs costs_of(profile const& measured, std::vector<bool> const& split) {
  profiled_costs out;
  out.hidden = std::max(measured.hidden, 0.0);
  int const stages = static_cast<int>(split.size());
  auto const several = [](int n) { return std::to_string(n) + (n == 1 ? " stage" : " stages"); };
  if (stages == 0 || measured.stages % stages != 0) {
    out.problem = "it has " + several(measured.stages) + ", which do not add up to this schedule's " + std::to_string(stages) +
                  ": take a profile with " + several(stages);
    return out;
  }
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) *list = buffer<double>(stages);
  int const each = measured.stages / stages;
  auto const lacks = [&](char const* key, int stage, char const* because) {
    if (out.problem.empty()) out.problem = std::string("'") + key + "' of stage " + std::to_string(stage) + " is null" + because;
  };
  for (int s = 0; s < stages; ++s) {
    double forward = 0, input = 0, weight = 0, again = 0;
    for (int k = s * each; k < (s + 1) * each; ++k) {
      auto const i = static_cast<std::size_t>(k);
      bool const halves = measured.backward_input[i] >= 0 && measured.backward_weight[i] >= 0;
      if (measured.forward[i] < 0) lacks("forward", k, ": take a profile of a schedule that trains");
      if (split[static_cast<std::size_t>(s)] && !halves) {
        lacks(
            "backward_input", k,
            ", for its backward ran whole, and this schedule takes it in two: take a profile under one that does, such as ZB-H1");
      } else if (!halves && measured.backward[i] < 0) {
        lacks("backward", k, ": take a profile of a schedule that trains");
      }
      forward += measured.forward[i];
      again += i < measured.recompute.size() && measured.recompute[i] > 0 ? measured.recompute[i] : measured.forward[i];
      // Where the backward stays whole, only the sum of its halves counts.
      bool const whole = !split[static_cast<std::size_t>(s)] && measured.backward[i] >= 0;
      input += whole ? measured.backward[i] : measured.backward_input[i];
      weight += whole ? 0 : measured.backward_weight[i];
    }
    if (!out.problem.empty()) return out;
    out.forward[s] = forward;
    out.backward_input[s] = input;
    out.backward_weight[s] = weight;
    out.recompute[s] = again;
  }
  std::vector<double> known;
  for (double const time : measured.communication) {
    if (time >= 0) known.push_back(time);
  }
  out.communication_known = !known.empty();
  out.communication = buffer<double>(std::max(stages - 1, 1), median(known));
  for (int s = 0; s + 1 < stages; ++s) {
    double const time = measured.communication[static_cast<std::size_t>((s + 1) * each - 1)];
    if (time >= 0) out.communication[s] = time;
  }
  return out;
}

/// How much costs have changed from one profile to a later one of as many stages: the largest change of what a stage takes for a
/// microbatch, or of what a message takes, as a share of the longest stage's time in the earlier. What either does not know is
/// left out.
inline double cost_drift(profile const& then, profile const& now) {
  auto const of_stage = [](profile const& p, std::size_t s) {
    bool const halves = p.backward_input[s] >= 0 && p.backward_weight[s] >= 0;
    double const back = halves ? p.backward_input[s] + p.backward_weight[s] : p.backward[s];
    return p.forward[s] < 0 || back < 0 ? profile::not_measured : p.forward[s] + back;
  };
  double longest = 0, change = 0;
  auto const look = [&](double a, double b) {
    if (a >= 0 && b >= 0) change = std::max(change, a < b ? b - a : a - b);
  };
  for (std::size_t s = 0; s < then.forward.size() && s < now.forward.size(); ++s) {
    longest = std::max(longest, of_stage(then, s));
    look(of_stage(then, s), of_stage(now, s));
  }
  for (std::size_t b = 0; b < then.communication.size() && b < now.communication.size(); ++b)
    look(then.communication[b], now.communication[b]);
  return longest > 0 ? change / longest : 0;
}

/// Whether a plan is the one that a profile was taken under, so that its measured times are what the plan's prediction is about.
inline bool taken_under(profile const& measured, plan_view const& plan) {
  return measured.pipeline > 0 && measured.schedule == plan.name && measured.size.ranks == plan.size.ranks &&
         measured.size.units() == plan.size.units() && measured.stages == plan.stages;
}

}  // namespace chevron
