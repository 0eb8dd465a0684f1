#pragma once

#include <cstdint>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/functions/tensor.h>

#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/stage/graph/graph_nodes.hpp>
#include <chevron/run/stage/graph/graph_walk.hpp>

/// \file
/// Starts a backward at custom functions below outputs that have no gradient.

namespace chevron::detail {

/// Whether a node is the backward of a custom function, or comes from outside of LibTorch: only such a node calls collectives.
inline bool may_call_ranks(Node const& node) {
  if (typeid(node) == typeid(graph_entry)) return false;
  if (auto const* const slices = dynamic_cast<torch::autograd::CopySlices const*>(&node))
    return slices->fn && may_call_ranks(*slices->fn);  // a change of a view in place
  std::string_view const type = typeid(node).name();
  return !type.starts_with("N5torch8autograd") || type.starts_with("N5torch8autograd7CppNodeI") ||
         type.starts_with("N5torch8autograd6PyNode");
}

/// Appends to the roots of a backward the custom functions that only outputs without a gradient lead to, with gradients of
/// zeros, so that the backward runs the same custom functions on every rank whose graph is equal, whichever outputs have a
/// gradient. Nodes between an output and its first custom functions do not run: their gradients are zeros, or, below a mean
/// over nothing, NaN.
///
/// The engine runs nodes in descending order of their forwards, whichever are the roots. So custom functions run in the same
/// order on all these ranks.
/// \param without_gradient edges of the outputs that have no gradient; invalid edges are skipped
/// \param roots edges of the outputs that have gradients
/// \param gradients of `roots`
inline void start_at_custom_functions(edge_list const& without_gradient, edge_list& roots, variable_list& gradients) {
  std::vector<Node*> const running = nodes_below(roots);
  std::unordered_set<Node*> seen(running.begin(), running.end());
  std::vector<node_ptr<>> next;
  auto const come_to = [&](edge_list const& edges) {
    for (Edge const& edge : edges) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) next.push_back(edge.function);
    }
  };
  come_to(without_gradient);
  while (!next.empty()) {
    node_ptr<> const node = next.back();
    next.pop_back();
    if (!may_call_ranks(*node)) {
      come_to(node->next_edges());
      continue;
    }
    for (std::uint32_t i = 0; i < node->num_inputs(); ++i) {
      if (node->input_metadata(i).was_default_constructed()) continue;
      roots.emplace_back(node, i);
      gradients.push_back(node->input_metadata(i).zeros_like());
    }
  }
}

}  // namespace chevron::detail
