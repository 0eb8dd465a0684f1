#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// Cutting a row of layers into stages.

namespace chevron {

/// How many layers each stage gets when consecutive layers with these costs are shared out so that the costliest stage costs as
/// little as possible; each stage gets one at least. Of several ways, the one that leaves the later stages less, since those hold
/// fewer microbatches.
/// \param costs one number a layer, from 0, in any unit: `parameter_counts`, `measured_costs` (seconds) or your own
/// \param stages of the schedule: ranks × chunks
/// \returns the number of layers of each stage
/// \throws usage_error for fewer layers than stages
inline std::vector<int> balance(std::vector<double> const& costs, int stages) {
  auto const layers = static_cast<int>(costs.size());
  if (stages < 1 || layers < stages) {
    throw usage_error(std::to_string(layers) + " layers cannot be cut into " + std::to_string(stages) +
                      " stages of at least one layer");
  }
  std::vector<double> before(costs.size() + 1, 0.0);
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  // least[s][i]: the smallest possible largest cost of s stages over the first i layers.
  double const never = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> least(static_cast<std::size_t>(stages) + 1, std::vector<double>(costs.size() + 1, never));
  std::vector<std::vector<int>> cut_at(least.size(), std::vector<int>(costs.size() + 1, 0));
  least[0][0] = 0;
  for (std::size_t s = 1; s < least.size(); ++s) {
    for (std::size_t i = s; i <= costs.size(); ++i) {
      for (std::size_t k = s - 1; k < i; ++k) {
        double const largest = std::max(least[s - 1][k], before[i] - before[k]);
        if (largest <= least[s][i]) {
          least[s][i] = largest;
          cut_at[s][i] = static_cast<int>(k);
        }
      }
    }
  }
  std::vector<int> sizes(static_cast<std::size_t>(stages));
  int end = layers;
  for (std::size_t s = least.size() - 1; s > 0; --s) {
    int const begin = cut_at[s][static_cast<std::size_t>(end)];
    sizes[s - 1] = end - begin;
    end = begin;
  }
  return sizes;
}

/// Stages of consecutive layers, `layers[s]` of them in stage s; a stage of none passes on what arrives. They share the layers
/// with `whole`, and parameters keep its names, so that they do not depend on the cut: `5.weight`. Every layer takes and gives
/// one tensor; a stage may take several where its first layer does.
///
///     auto const stages = chevron::partition(model, chevron::balance(chevron::parameter_counts(model), 4));
///
/// Build the model on each rank from the same seed, and give the trainer the stages it asks for.
/// \throws usage_error when the numbers do not add up to the layers there are
inline std::vector<stage> partition(torch::nn::Sequential const& whole, std::vector<int> const& layers) {
  int const sum = std::accumulate(layers.begin(), layers.end(), 0);
  bool const negative = std::any_of(layers.begin(), layers.end(), [](int n) { return n < 0; });
  if (sum != static_cast<int>(whole->size()) || negative) {
    std::string text;
    for (int const n : layers) text += (text.empty() ? "" : " + ") + std::to_string(n);
    throw usage_error("a model of " + std::to_string(whole->size()) + " layers cannot be cut into " +
                      (text.empty() ? "nothing" : text) + ": together stages take all layers, each as many or none");
  }
  auto const names = whole->named_children();
  std::vector<stage> made;
  auto layer = whole->begin();
  std::size_t number = 0;
  for (int const count : layers) {
    if (count == 0) {
      made.emplace_back([](std::span<at::Tensor const> values) { return tensors(values.begin(), values.end()); });
      continue;
    }
    torch::nn::Sequential piece;
    for (int i = 0; i < count; ++i, ++layer, ++number) piece->push_back(names[number].key(), *layer);
    made.emplace_back(piece);
  }
  return made;
}

/// By layer, for `balance`: the numbers in its parameters. Layers without any cost nothing.
inline std::vector<double> parameter_counts(torch::nn::Sequential const& whole) {
  std::vector<double> counts;
  for (auto const& layer : whole->children()) {
    double sum = 0;
    for (at::Tensor const& p : layer->parameters()) sum += static_cast<double>(p.numel());
    counts.push_back(sum);
  }
  return counts;
}

}  // namespace chevron
