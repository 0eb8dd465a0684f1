#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <chevron/plan/profile.hpp>

/// \file
/// Computes the bytes of layers from a profile's bytes of stages, and the bytes of stages with other numbers of layers.

namespace chevron::search {

/// The bytes of a layer, an embedding or a head, with the meaning of `profile`.
struct piece_bytes {
  std::int64_t fixed = 0, state = 0, gradient = 0, activation = 0, kept = 0, input = 0;
  std::int64_t carried = 0;  ///< the part of `activation` that later slices take: a recomputed stage stores it beside its input
};

/// The bytes of a model's parts: layers, to be divided among stages, an embedding on the first stage, and a head on the last.
struct layer_bytes {
  std::vector<piece_bytes> layers;
  piece_bytes embedding, head;
  int shard = 1;                 ///< number of replicas over which `state` is sharded in `fixed`
  bool gradients_known = false;  ///< whether the profile has the bytes of gradients
  bool state_known = false;      ///< whether the profile has the bytes of the optimizer's state
  std::string problem;           ///< why the bytes of layers cannot be computed; empty: they can

  /// Computes the bytes of stages; stage s has `cut[s]` layers. The first stage has no input gradient: its I computes nothing,
  /// and its W needs all that F has stored, so a layer there keeps its activations if they are more than `kept`.
  /// \param replicas number of replicas over which the optimizer's state is sharded; 0: as many as in the profile
  stage_bytes of(std::vector<int> const& cut, int replicas = 0) const {
    stage_bytes out;
    std::size_t next = 0;
    for (std::size_t s = 0; s < cut.size(); ++s) {
      piece_bytes sum;
      bool first = true;
      auto const add = [&](piece_bytes const& one) {
        if (first) sum.input = one.input;
        first = false;
        sum.fixed += one.fixed;
        sum.state += one.state;
        sum.gradient += one.gradient;
        sum.activation += one.activation;
        sum.kept += one.kept;
        sum.carried += one.carried;
      };
      if (s == 0) add(embedding);
      for (int i = 0; i < cut[s]; ++i, ++next) {
        add(layers[next]);
        if (s == 0) sum.kept += std::max<std::int64_t>(layers[next].activation - layers[next].kept, 0);
      }
      if (s + 1 == cut.size()) add(head);
      if (replicas > 0 && replicas != shard) sum.fixed += (sum.state * shard + replicas - 1) / replicas - sum.state;
      out.fixed.push_back(sum.fixed);
      out.activation.push_back(sum.activation);
      out.kept.push_back(sum.kept);
      out.input.push_back(std::min(sum.input + sum.carried, sum.activation));
      if (gradients_known) out.gradient.push_back(sum.gradient);
    }
    return out;
  }
};

/// Computes the bytes of layers from a profile whose stage s had `measured.layers[s]` layers. All layers of one stage count as
/// equal. Layers of the first and the last stage take as much as those of the next stage inwards; the rest of these two stages'
/// bytes is the embedding's and the head's. Rounds up.
/// \returns bytes whose `problem` names a missing list, or says that no stage between the first and the last has a layer
inline layer_bytes layer_bytes_of(profile const& measured) {
  layer_bytes out;
  auto const stages = static_cast<std::size_t>(measured.stages);
  out.problem = bytes_of(measured, measured.stages).problem;
  if (!out.problem.empty()) return out;
  if (measured.layers.size() != stages || stages < 3) {
    out.problem = measured.layers.empty() ? "'layers', the number of layers of each stage, is missing"
                                          : "it has fewer than 3 stages, of which no stage has layers alone";
    return out;
  }
  std::size_t after_first = 1, before_last = stages - 2;
  while (after_first + 1 < stages && measured.layers[after_first] < 1) ++after_first;
  while (before_last > after_first && measured.layers[before_last] < 1) --before_last;
  if (after_first + 1 == stages) {
    out.problem = "no stage between the first and the last held a layer";
    return out;
  }
  out.shard = measured.shard;
  out.gradients_known = !measured.gradient_bytes.empty();
  out.state_known = !measured.state_bytes.empty();
  auto const stage = [&](std::size_t s) {
    auto const at = [&](std::vector<std::int64_t> const& list) { return list.empty() ? 0 : list[s]; };
    return piece_bytes{at(measured.static_bytes),
                       at(measured.state_bytes),
                       at(measured.gradient_bytes),
                       at(measured.activation_bytes),
                       at(measured.kept_bytes.empty() ? measured.activation_bytes : measured.kept_bytes),
                       at(measured.input_bytes)};
  };
  auto const each_of = [](piece_bytes of, int count) {
    for (auto* one : {&of.fixed, &of.state, &of.gradient, &of.activation, &of.kept}) *one = (*one + count - 1) / count;
    return of;
  };
  piece_bytes const at_first = each_of(stage(after_first), measured.layers[after_first]);
  piece_bytes const at_last = each_of(stage(before_last), measured.layers[before_last]);
  auto const rest = [&](std::size_t s, piece_bytes layer) {
    piece_bytes all = stage(s);
    if (s == 0) layer.kept = std::max(layer.kept, layer.activation);
    int const count = measured.layers[s];
    for (auto const part :
         {&piece_bytes::fixed, &piece_bytes::state, &piece_bytes::gradient, &piece_bytes::activation, &piece_bytes::kept})
      all.*part = std::max<std::int64_t>(all.*part - count * layer.*part, 0);
    return all;
  };
  out.embedding = rest(0, at_first);
  out.head = rest(stages - 1, at_last);
  for (std::size_t s = 0; s < stages; ++s) {
    if (measured.layers[s] < 1) continue;
    piece_bytes const one = s == 0 ? at_first : s + 1 == stages ? at_last : each_of(stage(s), measured.layers[s]);
    out.layers.insert(out.layers.end(), static_cast<std::size_t>(measured.layers[s]), one);
  }
  return out;
}

}  // namespace chevron::search
