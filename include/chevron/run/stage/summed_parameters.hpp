#pragma once

#include <set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/shard_watch.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Finds whole parameters that a stage adds over the shards.

namespace chevron::detail {

/// The leaves that lead to a collective's result without another collective between them.
inline std::vector<at::Tensor> leaves_below(torch::autograd::Node& collective) {
  std::vector<torch::autograd::Node*> next{&collective};
  std::set<torch::autograd::Node*> seen{&collective};
  std::vector<at::Tensor> found;
  while (!next.empty()) {
    torch::autograd::Node* const node = next.back();
    next.pop_back();
    for (torch::autograd::Edge const& edge : node->next_edges()) {
      torch::autograd::Node* const below = edge.function.get();
      if (below == nullptr || with_gradient::node_of(below) != nullptr || !seen.insert(below).second) continue;
      if (auto const* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(below)) found.push_back(leaf->variable);
      next.push_back(below);
    }
  }
  return found;
}

/// Records the whole parameters that a stage adds over the shards, such as the bias of a row-parallel layer in
/// `all_reduce(linear(x, w, bias))`. If their gradients are equal on all shards, the sum has them T times. A parameter that
/// passes `shard_group::copy` is right there, since its gradient is summed; so is one that is declared cut or partial.
inline void watch_summed_parameters(stage const& owner, stage_graph const& graph, shard_watch& watch) {
  for (torch::autograd::Node* const node : graph.nodes()) {
    auto* const collective = with_gradient::node_of(node);
    if (collective == nullptr || !with_gradient::adds_up(*collective)) continue;
    for (at::Tensor const& leaf : leaves_below(*collective)) {
      for (parameter const& p : owner.parameters()) {
        if (p.value.is_same(leaf) && p.held == over_shards::replicated) watch.adds(p.name);
      }
    }
  }
}

}  // namespace chevron::detail
