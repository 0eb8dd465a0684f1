#pragma once

#include <cstddef>
#include <vector>

#include <chevron/prove/slice_times.hpp>
#include <chevron/tools/search/layer_costs.hpp>

/// \file
/// The costs of layers for each slice of a microbatch.

namespace chevron::search {

/// The costs of a model's parts for each slice of a microbatch, in milliseconds.
struct sliced_layer_costs {
  std::vector<layer_costs> slices;  ///< by slice, at least one, with equally many layers; one: microbatches are whole

  /// Adds the time of the forward that recomputation repeats to the backward of each slice.
  void recompute() {
    for (layer_costs& one : slices) one.recompute();
  }
  /// The costs of a microbatch: of each part, the sums over its slices. Transfers and latencies are those of the first slice.
  layer_costs whole() const {
    layer_costs out = slices.front();
    auto const add = [](piece_costs& to, piece_costs const& one) {
      to.forward += one.forward;
      to.backward_input += one.backward_input;
      to.backward_weight += one.backward_weight;
    };
    for (std::size_t i = 1; i < slices.size(); ++i) {
      add(out.embedding, slices[i].embedding);
      add(out.head, slices[i].head);
      for (std::size_t layer = 0; layer < out.layers.size(); ++layer) add(out.layers[layer], slices[i].layers[layer]);
    }
    return out;
  }
  /// The costs of stages; stage s has `cut[s]` layers.
  sliced_costs of(std::vector<int> const& cut) const {
    sliced_costs out;
    for (layer_costs const& one : slices) out.slices.push_back(one.of(cut));
    return out;
  }
};

}  // namespace chevron::search
