#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/random_scope.hpp>

/// \file
/// Random numbers that a backward draws: noise on gradients, stochastic rounding.

namespace chevron {

namespace detail {

/// The place that determines the stream of random numbers for a node of autograd's graph.
/// \param node the node that the engine executes; null between nodes
/// \param use selects the stream of nodes that were made at none of `places`, for example in a backward
inline rng_key stream_at(node_places const& places, torch::autograd::Node const* node, random_use use) {
  if (auto const* const leaf = dynamic_cast<torch::autograd::AccumulateGrad const*>(node)) {
    for (node_places::leaves const& of : places.all_leaves()) {
      for (std::size_t i = 0; i < of.all->size(); ++i) {
        if (!(*of.all)[i].value.is_same(leaf->variable)) continue;
        rng_key key = of.at;
        key.part = -1;
        key.use = random_use::backward;
        key.node = i + 1;
        return key;
      }
    }
  } else if (node != nullptr) {
    for (auto range = places.ranges().rbegin(); range != places.ranges().rend(); ++range) {  // the innermost range first
      if (node->sequence_nr() < range->first || node->sequence_nr() >= range->last) continue;
      rng_key key = range->at;
      key.use = random_use::backward;
      key.node = node->sequence_nr() - range->first + 1;
      return key;
    }
  }
  rng_key key = places.ranges().empty() ? rng_key() : places.ranges().front().at;
  key.use = use;
  return key;
}

/// Provides one generator for each node, so that the order in which B, I or W visit nodes does not matter.
struct stream_by_node final : random_stream {
  node_places const* places = nullptr;
  random_use use = random_use::backward;
  std::unordered_map<std::uint64_t, at::Generator> generators;  // by seed

  at::Generator const& ready() override {
    std::uint64_t const seed = stream_of(stream_at(*places, torch::autograd::get_current_node().get(), use));
    at::Generator& one = generators[seed];
    if (!one.defined()) one = at::make_generator<at::CPUGeneratorImpl>(seed);
    return one;
  }
};

}  // namespace detail

/// During this object's lifetime, this thread's backward draws, in operators called without a generator, from streams that
/// depend on where in the model the graph was made. Each node of the graph has a stream, also for the hooks on the gradients
/// that arrive at the node; each parameter has a stream for the hooks on its gradient. The executor opens a scope around every
/// B, I and W; a plain loop with the same scopes draws the same numbers:
///
///     chevron::node_places places;
///     for (int s = 0; s < stages; ++s) {
///       chevron::random_scope const draws({.seed = seed, .step = step, .stage = s, .micro_batch = m}, {}, &places);
///       x = modules[s]->forward(x);
///     }
///     at::Tensor const loss = ...;
///     chevron::backward_scope const draws(places);
///     loss.backward();
///
/// Hooks draw from a parameter's stream only if `node_places::add_leaves` was called with the parameter;
/// `chevron::stage::forward` calls it.
///
/// On an accelerator, nodes draw from the device's default generator, which is seeded once for the whole B or I, and again for
/// W: numbers repeat from run to run, but a B draws different numbers than an I and a W.
class backward_scope {
 public:
  /// \param places recorded by the forward; must outlive this object
  /// \param near   tensors on the accelerators used for draws; none for the CPU
  /// \param use    `backward_weight` for a W
  explicit backward_scope(node_places const& places, std::span<at::Tensor const> near = {}, random_use use = random_use::backward)
      : devices_(stream_of(detail::stream_at(places, nullptr, use)), near), drawing_(stream_) {
    stream_.places = &places;
    stream_.use = use;
  }
  backward_scope(backward_scope const&) = delete;
  backward_scope& operator=(backward_scope const&) = delete;

  /// Whether any number was drawn.
  /// \throws usage_error if a draw used a device on which several ranks of this process compute
  bool drew() const { return devices_.drew() || !stream_.generators.empty(); }

 private:
  detail::stream_by_node stream_;
  detail::seeded_devices devices_;
  detail::drawing_from drawing_;
};

}  // namespace chevron
