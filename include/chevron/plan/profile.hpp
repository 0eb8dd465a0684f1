#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/footprint.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Costs that a run measured, and functions that compute the planner's costs from them. `read_profile` (profile_file.hpp)
/// reads a profile from a file's text.

namespace chevron {

/// Returns the median of `values` (of an even number, the larger of the middle two); 0 for an empty list.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The bytes that stages store for one slice of a microbatch, by stage, with the meaning of `footprint_view`.
struct slice_bytes {
  std::vector<std::int64_t> activation, input;
  std::vector<std::int64_t> kept;  ///< empty: not known
};

/// Measured costs, in milliseconds. Costs of actions that never ran, and of messages between stages of one rank, are
/// `not_measured`.
struct profile {
  static constexpr double not_measured = -1;

  std::string schedule;  ///< the schedule of the measured run; empty: not known
  shape size{};          ///< the size of the measured run; 0: not known
  int stages = 0;
  int replicas = 1;
  int steps = 0;        ///< number of measured steps; 0: not known
  double pipeline = 0;  ///< measured makespan, from the first F to the last B or W of a replica; median; 0: not known
  double step = 0;      ///< time of a whole step, with gradient sums and optimizer, on a replica's slowest rank; median
  /// Medians, one entry for each stage; of sequences in slices, sums over a microbatch's slices (in the costs that a running
  /// program plans with, those of a slice). Stage 0 has no input gradient, so its measured I takes almost no time; planning
  /// needs no flag for it.
  std::vector<double> forward, backward, backward_input, backward_weight;
  std::vector<double> recompute;      ///< time of R, one entry for each stage; empty: no R ran
  std::vector<double> communication;  ///< one entry for each boundary between stages, for both directions
  double hidden = not_measured;       ///< share of a fused pair's shorter half that the longer half hides: 0 to 1
  std::vector<int> layers;            ///< by stage: number of layers that can move to other stages; empty: not known
  /// Bytes, one entry for each stage, with the meaning of `footprint_view`; empty: not known.
  std::vector<std::int64_t> static_bytes, activation_bytes, kept_bytes, input_bytes;
  /// Parts of `static_bytes`, one entry for each stage; empty: not known. `state_bytes` is the optimizer's state,
  /// `gradient_bytes` the gradients, except those of tied parameters.
  std::vector<std::int64_t> state_bytes, gradient_bytes;
  int shard = 1;  ///< number of replicas over which the optimizer's state was sharded
  /// By slice, if the measured run had slices: the parts of `activation_bytes`, `kept_bytes` and `input_bytes`, which are those
  /// of whole microbatches. Empty: not known.
  std::vector<slice_bytes> slices;
  std::string model;  ///< the model's sizes, as the JSON object that `chevron-plan model` writes; empty: not known

  /// The median of the measured times of messages; 0 if no message was measured.
  double median_communication() const {
    std::vector<double> known;
    std::copy_if(communication.begin(), communication.end(), std::back_inserter(known), [](double time) { return time >= 0; });
    return median(known);
  }
};

/// Costs computed from a profile, for one number of stages.
struct profiled_costs : owned_costs {
  bool communication_known = false;  ///< false: the profile has no measured boundary, and every message costs 0
  std::string problem;               ///< why costs cannot be computed from the profile; empty: they can
};

/// Bytes by stage, with the meaning of `footprint_view`; owns its memory.
struct stage_bytes {
  std::vector<std::int64_t> fixed, activation, kept, input;
  std::vector<std::int64_t> gradient;  ///< the part of `fixed` that is gradients which replicas may shard; empty: not known
  std::string problem;                 ///< why bytes cannot be computed; empty: they can

  /// \param recomputed by stage: whether it is recomputed; null: no stage is. Must outlive the view
  footprint_view view(bool const* recomputed = nullptr) const {
    return {fixed.data(), activation.data(), kept.data(), input.data(), recomputed};
  }
};

/// Unites neighbouring stages of a profile into `stages` stages: equally many in each or, if each stage of the profile has one
/// layer, as evenly as possible, more to the front, as chevron-train divides layers.
/// \returns offsets: stage s unites the profile's stages [out[s], out[s + 1]). Empty: the profile's stages do not add up
inline std::vector<int> united_stages(profile const& measured, int stages) {
  bool const of_layers = static_cast<int>(measured.layers.size()) == measured.stages &&
                         std::count(measured.layers.begin(), measured.layers.end(), 1) == measured.stages;
  std::vector<int> out;
  if (stages < 1 || stages > measured.stages || (measured.stages % stages != 0 && !of_layers)) return out;
  for (long s = 0; s <= stages; ++s) out.push_back(static_cast<int>((s * measured.stages + stages - 1) / stages));
  return out;
}

/// Computes the bytes of the profile's model cut into `stages` stages (`united_stages`). If the profile has no `kept_bytes`,
/// assumes that W needs all activations.
/// \param shard number of replicas over which the optimizer's state is sharded; 0: as many as in the measured run
inline stage_bytes bytes_of(profile const& measured, int stages, int shard = 0) {
  stage_bytes out;
  char const* const missing = measured.activation_bytes.empty() ? "activation_bytes"
                              : measured.static_bytes.empty()   ? "static_bytes"
                              : measured.input_bytes.empty()    ? "input_bytes"
                                                                : nullptr;
  if (missing != nullptr) {
    out.problem = std::string("'") + missing + "' is missing: write one entry for each stage, in bytes";
    return out;
  }
  bool const anew = shard > 0 && shard != measured.shard;
  if (anew && measured.state_bytes.empty()) {
    out.problem =
        "'state_bytes' is missing, so that a share of the optimizer's state is unknown: write the state's bytes, one entry for "
        "each stage";
    return out;
  }
  std::vector<int> const begin = united_stages(measured, stages);
  if (begin.empty()) {
    out.problem = "it has " + std::to_string(measured.stages) + " stages, which do not add up to " + std::to_string(stages);
    return out;
  }
  auto const together = [&](std::vector<std::int64_t> const& list, int s) {
    std::int64_t sum = 0;
    for (int k = begin[static_cast<std::size_t>(s)]; k < begin[static_cast<std::size_t>(s) + 1]; ++k)
      sum += list[static_cast<std::size_t>(k)];
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
    out.input.push_back(measured.input_bytes[static_cast<std::size_t>(begin[static_cast<std::size_t>(s)])]);
    if (!measured.gradient_bytes.empty()) out.gradient.push_back(together(measured.gradient_bytes, s));
  }
  return out;
}

/// The profile with the bytes of one slice in place of those of a whole microbatch.
/// \param slice index, less than the size of `measured.slices`
inline profile of_slice(profile measured, std::size_t slice) {
  slice_bytes one = std::move(measured.slices[slice]);
  measured.slices.clear();
  measured.activation_bytes = std::move(one.activation);
  measured.kept_bytes = std::move(one.kept);
  measured.input_bytes = std::move(one.input);
  return measured;
}

/// Returns, by stage, whether a plan has I and W in place of B.
inline std::vector<bool> split_stages(plan_view const& plan) {
  std::vector<bool> out(static_cast<std::size_t>(plan.stages));
  for (int i = 0; i < plan.total(); ++i) {
    if (leaves_weight(plan.actions[i].kind)) out[plan.actions[i].stage] = true;
  }
  return out;
}

/// Computes the costs of the profile's model cut into one stage for each entry of `split`; an entry is true if the stage needs
/// separate costs of I and W. If the profile has more stages, sums the costs of neighbouring stages (`united_stages`). A
/// boundary that was not measured (its stages were on one rank) gets the median of the measured boundaries.
inline profiled_costs costs_of(profile const& measured, std::vector<bool> const& split) {
  profiled_costs out;
  out.hidden = std::max(measured.hidden, 0.0);
  int const stages = static_cast<int>(split.size());
  auto const several = [](int n) { return std::to_string(n) + (n == 1 ? " stage" : " stages"); };
  std::vector<int> const begin = united_stages(measured, stages);
  if (begin.empty()) {
    out.problem = "it has " + several(measured.stages) + ", which do not add up to this schedule's " + std::to_string(stages) +
                  ": take a profile with " + several(stages) + ", or with one layer in each stage";
    return out;
  }
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight, &out.recompute}) *list = buffer<double>(stages);
  auto const lacks = [&](char const* key, int stage, char const* because) {
    if (out.problem.empty()) out.problem = std::string("'") + key + "' of stage " + std::to_string(stage) + " is null" + because;
  };
  for (int s = 0; s < stages; ++s) {
    double forward = 0, input = 0, weight = 0, again = 0;
    for (int k = begin[static_cast<std::size_t>(s)]; k < begin[static_cast<std::size_t>(s) + 1]; ++k) {
      auto const i = static_cast<std::size_t>(k);
      bool const halves = measured.backward_input[i] >= 0 && measured.backward_weight[i] >= 0;
      if (measured.forward[i] < 0) lacks("forward", k, ": take a profile of a schedule that trains");
      if (split[static_cast<std::size_t>(s)] && !halves) {
        lacks(
            "backward_input", k,
            ": the measured schedule ran B, and this one needs the times of I and W: take a profile of a schedule with I and W, "
            "such as ZB-H1");
      } else if (!halves && measured.backward[i] < 0) {
        lacks("backward", k, ": take a profile of a schedule that trains");
      }
      forward += measured.forward[i];
      again += i < measured.recompute.size() && measured.recompute[i] > 0 ? measured.recompute[i] : measured.forward[i];
      // If the backward is not split, only the sum of I and W counts.
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
  out.communication = buffer<double>(std::max(stages - 1, 1), measured.median_communication());
  for (double const time : measured.communication) out.communication_known = out.communication_known || time >= 0;
  for (int s = 0; s + 1 < stages; ++s) {
    double const time = measured.communication[static_cast<std::size_t>(begin[static_cast<std::size_t>(s) + 1] - 1)];
    if (time >= 0) out.communication[s] = time;
  }
  return out;
}

/// Returns the largest change of a cost from the profile `then` to the later profile `now` with as many stages: of a stage's
/// time for a microbatch or of a message's time, as a share of the longest stage's time in `then`. Ignores costs that either
/// profile lacks.
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

/// Whether a profile was measured under this plan, so that the plan's prediction can be compared with the measured times.
inline bool taken_under(profile const& measured, plan_view const& plan) {
  return measured.pipeline > 0 && measured.schedule == plan.name && measured.size.ranks == plan.size.ranks &&
         measured.size.units() == plan.size.units() && measured.stages == plan.stages;
}

}  // namespace chevron
