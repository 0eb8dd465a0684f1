#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <chevron/plan/profile.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Divides consecutive layers among stages.

namespace chevron {

/// Divides consecutive layers among stages so that the costliest stage costs as little as possible; each stage gets at least
/// one layer. Of several such divisions, returns one with lower costs in later stages. Uses dynamic programming.
/// \param costs cost of each layer, at least 0, in any unit: `parameter_counts`, `measured_costs` (seconds) or your own
/// \param stages number of the schedule's stages: ranks × chunks
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

/// Stages of consecutive layers: stage s has `layers[s]` layers; a stage without layers passes tensors on. The stages share the
/// layers of `whole`, and parameters have the names that they have in `whole` (`5.weight`), for every division. Every layer
/// takes and returns one tensor; the first layer of a stage may take several.
///
///     auto const stages = chevron::partition(model, chevron::balance(chevron::parameter_counts(model), 4));
///
/// Build the model on each rank from the same seed; the trainer uses the stages of its rank.
/// \throws usage_error if `layers` do not sum to the number of layers of `whole`, or an entry is negative
inline std::vector<stage> partition(torch::nn::Sequential const& whole, std::vector<int> const& layers) {
  int const sum = std::accumulate(layers.begin(), layers.end(), 0);
  bool const negative = std::any_of(layers.begin(), layers.end(), [](int n) { return n < 0; });
  if (sum != static_cast<int>(whole->size()) || negative) {
    std::string text;
    for (int const n : layers) text += (text.empty() ? "" : " + ") + std::to_string(n);
    throw usage_error("a model of " + std::to_string(whole->size()) + " layers cannot be cut into " +
                      (text.empty() ? "nothing" : text) +
                      ". Remedy: a number of layers, 0 or more, for each stage, which add up to all layers");
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

/// The number of parameter elements of each layer of `whole`, as costs for `balance`. A layer without parameters costs nothing.
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
