#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <torch/nn/modules/container/sequential.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/partition.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_execution.hpp>

/// \file
/// Measures the times of layers, from which `balanced` assigns layers to stages.

namespace chevron {

/// Measures the seconds of each layer's forward and backward for an input: the median of `times` runs, after one unmeasured
/// run. Parameters, gradients, buffers and the default random generator are unchanged afterwards.
/// \param whole the model \param input input of the first layer \returns seconds by layer, for `balanced`
inline std::vector<double> measured_costs(torch::nn::Sequential const& whole, tensors const& input, int times = 5) {
  std::vector<double> costs;
  tensors values = input;
  for (stage& layer : partition(whole, std::vector<int>(whole->size(), 1))) {
    std::vector<at::Tensor> gradients;
    for (parameter const& p : layer.parameters()) gradients.push_back(std::exchange(p.value.mutable_grad(), at::Tensor()));
    detail::buffer_snapshot before(std::span(&layer, 1));
    before.take();

    stage_call const task{.owner = &layer, .around = {.draws = rng_key{}}, .training = true, .differentiable = !costs.empty()};
    std::vector<double> seconds;
    tensors outputs;
    for (int run = 0; run <= times; ++run) {
      detail::stage_execution work;
      tensors inputs = values, output_gradients, input_gradients;
      std::int64_t const begin = now_ns();
      work.forward(task, inputs, outputs);
      std::int64_t const between = now_ns();
      for (at::Tensor const& t : outputs) {
        if (detail::carries_gradient(t)) output_gradients.push_back(at::ones_like(t));
      }
      std::int64_t const again = now_ns();
      work.backward(task, output_gradients, input_gradients);
      if (run > 0) seconds.push_back(static_cast<double>(between - begin + now_ns() - again) * 1e-9);
    }
    costs.push_back(median(std::move(seconds)));
    values = std::move(outputs);

    for (std::size_t i = 0; i < gradients.size(); ++i) layer.parameters()[i].value.mutable_grad() = gradients[i];
    before.put_back();
  }
  return costs;
}

/// Returns the mean of all ranks' costs, equal on every rank: measurements of two ranks differ, but all ranks must assign
/// layers equally. Collective. \param mine costs by layer that this rank measured, equally many on every rank
inline std::vector<double> mean_over_ranks(transport& comm, std::vector<double> const& mine) {
  std::vector<double> all(mine.size() * static_cast<std::size_t>(comm.topology().world()));
  comm.all_gather(mine, all);
  std::vector<double> mean(mine.size());
  for (std::size_t i = 0; i < all.size(); ++i) mean[i % mine.size()] += all[i] / static_cast<double>(comm.topology().world());
  return mean;
}

}  // namespace chevron
