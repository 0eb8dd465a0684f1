#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/profile.hpp>

/// \file
/// Computes the costs of layers from measured costs of stages, and the costs of stages with other numbers of layers.

namespace chevron::search {

/// The costs of a layer, an embedding or a head, for one microbatch.
struct piece_costs {
  double forward = 0, backward_input = 0, backward_weight = 0;
};

/// The costs of a model's parts: layers, to be divided among stages, an embedding on the first stage, and a head on the last.
/// Times are in milliseconds, as in a profile.
struct layer_costs {
  std::vector<piece_costs> layers;
  piece_costs embedding, head;    ///< if `first_input` ≥ 0, all of the embedding's backward is in W
  double first_input = -1;        ///< time of I on a first stage without input gradient; below 0: the stage has one
  double communication = 0;       ///< time of a message, at any boundary
  std::vector<double> transfers;  ///< time of a message by boundary, if links differ; empty: `communication` for each
  std::vector<double> latency;    ///< latency of a message by boundary; empty: none
  occupies communication_occupies = occupies::nobody;
  double hidden = 0;    ///< share of a fused pair's shorter half that is hidden
  std::string problem;  ///< why the costs of layers cannot be computed; empty: they can

  /// Adds the time of the forward that recomputation repeats to the backward of each layer, the embedding and the head.
  void recompute() {
    for (auto* piece : {&embedding, &head}) piece->backward_input += piece->forward;
    for (piece_costs& piece : layers) piece.backward_input += piece.forward;
  }

  /// The costs of stages; stage s has `cut[s]` layers.
  owned_costs of(std::vector<int> const& cut) const {
    owned_costs out;
    for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight})
      *list = buffer<double>(static_cast<int>(cut.size()));
    out.hidden = hidden;
    std::size_t next = 0;
    for (std::size_t s = 0; s < cut.size(); ++s) {
      piece_costs sum;
      auto const add = [&](piece_costs const& one) {
        sum.forward += one.forward;
        sum.backward_input += one.backward_input;
        sum.backward_weight += one.backward_weight;
      };
      if (s == 0) add(embedding);
      for (int i = 0; i < cut[s]; ++i) add(layers[next++]);
      if (s + 1 == cut.size()) add(head);
      if (s == 0 && first_input >= 0) {
        sum.backward_weight += sum.backward_input;
        sum.backward_input = first_input;
      }
      out.forward[s] = sum.forward;
      out.backward_input[s] = sum.backward_input;
      out.backward_weight[s] = sum.backward_weight;
    }
    out.communication = buffer<double>(static_cast<int>(std::max<std::size_t>(cut.size(), 2)) - 1, communication);
    if (!transfers.empty()) out.communication = transfers;
    out.latency = latency;
    out.communication_occupies = communication_occupies;
    return out;
  }
};

/// Divides layers as evenly as possible, more to the front. With two more stages than layers, embedding and head are stages of
/// their own.
inline std::vector<int> even_layers(int layers, int stages) {
  auto const begin = [&](int s) {
    return stages == layers + 2 ? std::clamp(s - 1, 0, layers) : (s * layers + stages - 1) / stages;
  };
  std::vector<int> out;
  for (int s = 0; s < stages; ++s) out.push_back(begin(s + 1) - begin(s));
  return out;
}

/// The numbers of layers of the stages, in the format of chevron-train's `--layers`: `4,4,3,1`.
inline std::string layers_text(std::vector<int> const& layers) {
  std::string out;
  for (int const count : layers) out += (out.empty() ? "" : ",") + std::to_string(count);
  return out;
}

/// Computes the costs of layers from a profile whose stage s had `measured.layers[s]` layers. All layers of one stage count as
/// equal. Layers of the first and the last stage cost as much as those of the next stage inwards; the rest of these two stages'
/// costs is the embedding's and the head's.
/// \param split whether I and W need separate costs
inline layer_costs layer_costs_of(profile const& measured, bool split) {
  layer_costs out;
  auto const stages = static_cast<std::size_t>(measured.stages);
  auto const refuse = [&](std::string why) {
    out.problem = std::move(why);
    return out;
  };
  if (measured.layers.empty())
    return refuse("'layers', the number of layers of each stage, is missing: take a profile with chevron-train");
  profiled_costs const costs = costs_of(measured, std::vector<bool>(stages, split));
  if (!costs.problem.empty()) return refuse(costs.problem);
  if (stages < 3)
    return refuse("it has " + std::to_string(stages) + (stages == 1 ? " stage" : " stages") +
                  "; the cost of a layer comes from a stage without embedding and head: take a profile with 3 stages or more");
  // The first and the last inner stage that have layers.
  std::size_t after_first = 1, before_last = stages - 2;
  while (after_first + 1 < stages && measured.layers[after_first] < 1) ++after_first;
  while (before_last > after_first && measured.layers[before_last] < 1) --before_last;
  if (after_first + 1 == stages) return refuse("no stage between the first and the last held a layer");
  out.hidden = costs.hidden;
  out.communication = measured.median_communication();
  auto const stage = [&](std::size_t s) {
    return piece_costs{costs.forward[s], costs.backward_input[s], costs.backward_weight[s]};
  };
  auto const each_of = [](piece_costs const& all, int count) {
    return piece_costs{all.forward / count, all.backward_input / count, all.backward_weight / count};
  };
  // A stage's cost without its layers. If the layers would cost more than the stage, they get the whole cost of the stage, and
  // nothing remains.
  auto const rest = [](double all, int count, double& of_layer) {
    if (count > 0 && all < count * of_layer) of_layer = all / count;
    return all - count * of_layer;
  };
  int const first = measured.layers.front(), last = measured.layers.back();
  piece_costs at_first = each_of(stage(after_first), measured.layers[after_first]);
  piece_costs at_last = each_of(stage(before_last), measured.layers[before_last]);
  piece_costs const begin = stage(0), end = stage(stages - 1);
  out.embedding.forward = rest(begin.forward, first, at_first.forward);
  double backward = at_first.backward_input + at_first.backward_weight;
  // If the first stage has hardly any input gradient, its whole backward counts as W.
  bool const none = split && begin.backward_input < 0.5 * std::max(first, 1) * at_first.backward_input;
  if (none) {
    out.first_input = begin.backward_input;
    double const as_measured = backward;
    out.embedding.backward_weight = rest(begin.backward_weight, first, backward);
    if (as_measured > 0) {
      at_first.backward_input *= backward / as_measured;
      at_first.backward_weight *= backward / as_measured;
    }
  } else {
    out.embedding.backward_input = rest(begin.backward_input, first, at_first.backward_input);
    out.embedding.backward_weight = rest(begin.backward_weight, first, at_first.backward_weight);
  }
  out.head.forward = rest(end.forward, last, at_last.forward);
  out.head.backward_input = rest(end.backward_input, last, at_last.backward_input);
  out.head.backward_weight = rest(end.backward_weight, last, at_last.backward_weight);
  for (std::size_t s = 0; s < stages; ++s) {
    if (measured.layers[s] < 1) continue;
    piece_costs const one = s == 0 ? at_first : s + 1 == stages ? at_last : each_of(stage(s), measured.layers[s]);
    out.layers.insert(out.layers.end(), static_cast<std::size_t>(measured.layers[s]), one);
  }
  return out;
}

}  // namespace chevron::search
