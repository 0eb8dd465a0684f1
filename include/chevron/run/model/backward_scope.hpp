#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/model/random_scope.hpp>

/// \file
/// Random numbers that a backward draws: noise on gradients, stochastic rounding.

namespace chevron {

namespace detail {

/// The stream of one node of a graph.
/// \param node that the engine is at; null between nodes
/// \param use  of a node that was made in none of the places, by a backward itself, say: they share a stream
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
    for (auto range = places.ranges().rbegin(); range != places.ranges().rend(); ++range) {  // the innermost
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

/// A generator for each node that draws: the engine comes to a node in B, I or W, as the schedule has it.
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

/// While it lives, what a backward in this thread draws without naming a generator comes from streams of the places where its
/// graph was made: each node of the graph has a stream, together with the hooks on the gradients that arrive there, and so has
/// each parameter for the hooks on its gradient. The executor opens one around every B, I and W; a plain loop that does the same
/// draws the same numbers:
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
/// Hooks on parameters draw from streams of `node_places::add_leaves`, which `chevron::stage::forward` calls by itself.
///
/// On an accelerator, whose nodes draw from the device's default generator, that is set once for the whole B or I, and anew for
/// W: numbers repeat from run to run, but B draws others than I and W do.
class backward_scope {
 public:
  /// \param places noted by the forward; they must outlive this
  /// \param near   tensors on the devices that are drawn on; the CPU needs none
  /// \param use    `backward_weight` for a W
  explicit backward_scope(node_places const& places, std::span<at::Tensor const> near = {}, random_use use = random_use::backward)
      : devices_(stream_of(detail::stream_at(places, nullptr, use)), near), drawing_(stream_) {
    stream_.places = &places;
    stream_.use = use;
  }
  backward_scope(backward_scope const&) = delete;
  backward_scope& operator=(backward_scope const&) = delete;

  /// Whether anything was drawn.
  /// \throws usage_error as `random_scope::drew`
  bool drew() const { return devices_.drew() || !stream_.generators.empty(); }

 private:
  detail::stream_by_node stream_;
  detail::seeded_devices devices_;
  detail::drawing_from drawing_;
};

}  // namespace chevron
