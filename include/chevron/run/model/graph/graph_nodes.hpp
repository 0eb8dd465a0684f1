#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <chevron/run/core/libtorch.hpp>

/// \file
/// Nodes of autograd's graph where the backward of a stage begins, ends or is cut, and which of a graph's nodes lead to inputs,
/// to parameters or to both.

namespace chevron {

namespace detail {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// The node from which a stage's inputs come in its graph. So inputs are no leaves, and a stage may change them in place, as in
/// the un-pipelined model.
struct graph_entry final : Node {
  variable_list gradients;
  variable_list apply(variable_list&& arriving) override {
    gradients = std::move(arriving);
    return {};
  }
};

/// A root of W: passes gradients that I kept to its next nodes. The engine's own root requires all gradients to be defined, but
/// if a node has several outputs (as an LSTM's has) only some may have been used.
struct kept_gradients final : Node {
  variable_list kept;
  variable_list apply(variable_list&&) override { return std::move(kept); }
};

/// Replaces, in I, a node that leads only to parameters: the gradient that arrives here is kept for W.
struct gradient_sink final : Node {
  explicit gradient_sink(torch::autograd::InputMetadata const& like) {
    add_input_metadata(at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector()));  // one element of memory
  }
  variable_list apply(variable_list&&) override { return {}; }
};

/// Whether a node that leads to inputs and to parameters computes the gradients of both in one call. LibTorch's own functions
/// compute only the requested gradients, so I and W may call them in turn. Nodes that must be called once are backwards of custom
/// functions, nodes from outside of LibTorch, TorchScript graphs and functions with a post-hook, which may do more than compute
/// gradients; and LibTorch's group norm, which for a channels_last input also writes an input gradient that was not requested, to
/// memory that does not exist (2.11).
inline bool is_asked_once(Node& node) {
  std::string_view const type = typeid(node).name();
  return !node.post_hooks().empty() || !type.starts_with("N5torch8autograd9generated") ||
         type.find("NativeGroupNormBackward0") != std::string_view::npos;  // its header would cost seconds to compile
}

/// Changes the target of a node's i-th edge. An in-place change of a view (`CopySlices`) holds an inner operation with the same
/// edges.
inline void lead(Node& node, std::size_t i, Edge const& to) {
  auto* const slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (slices != nullptr && slices->fn) slices->fn->next_edges()[i] = to;
  node.next_edges()[i] = to;
}

/// A node with a branch to parameters, and the gradients that arrived at each of its inputs: W computes the branch's gradients
/// from them.
struct kept_node {
  node_ptr<> node;
  variable_list gradients;
};

/// Keeps the gradients that arrive at a node, just before the engine runs it and after the user's hooks. One for each input of
/// the node: a node with several outputs in the forward (an LSTM) gets one gradient for each.
struct keep_gradients final : torch::autograd::FunctionPreHook {
  std::vector<kept_node>* kept;
  std::size_t index;
  keep_gradients(std::vector<kept_node>* list, std::size_t position) : kept(list), index(position) {}
  variable_list operator()(variable_list const& arriving) override {
    (*kept)[index].gradients = arriving;
    return arriving;
  }
};

/// Whether a node leads to the stage's inputs, to parameters, or to both.
struct reach {
  bool input = false;
  bool parameter = false;
};

/// A node that leads to the stage's inputs. If a branch of it leads to parameters only, `asked_once` or `kept` is set.
struct path_node {
  node_ptr<> node;
  bool asked_once = false;
  bool kept = false;
};

/// All nodes to which edges lead, directly or by way of other nodes, each once.
inline std::vector<Node*> nodes_below(edge_list const& roots) {
  std::vector<Node*> found;
  std::unordered_set<Node*> seen{nullptr};
  auto const come_to = [&](edge_list const& edges) {
    for (Edge const& edge : edges) {
      if (seen.insert(edge.function.get()).second) found.push_back(edge.function.get());
    }
  };
  come_to(roots);
  for (std::size_t i = 0; i < found.size(); ++i) come_to(found[i]->next_edges());
  return found;
}

/// Where the nodes below some edges lead.
class graph_walk {
 public:
  graph_walk(Node const* entry, edge_list const& roots) {
    std::vector<Node*> nodes = nodes_below(roots);
    auto const nearer_the_end = [](Node const* a, Node const* b) { return a->topological_nr() < b->topological_nr(); };
    std::sort(nodes.begin(), nodes.end(), nearer_the_end);
    for (Node* const node : nodes) {
      // A node without next edges is an end of gradients: the entry, or a leaf that accumulates them.
      reach& here = found_[node] = {node == entry, node->next_edges().empty() && node != entry};
      for (Edge const& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        reach const onward = of(edge.function.get());
        here.input = here.input || onward.input;
        here.parameter = here.parameter || onward.parameter;
      }
    }
  }

  reach of(Node* node) const { return found_.at(node); }

  bool leads_to_parameters_only(Edge const& edge) const {
    if (!edge.is_valid()) return false;
    reach const r = of(edge.function.get());
    return r.parameter && !r.input;
  }

  /// Lists the path nodes below the roots.
  void collect_path(edge_list const& roots, std::vector<path_node>& path) {
    std::unordered_set<Node*> listed;
    auto add = [&](node_ptr<> const& node) {
      if (found_.at(node.get()).input && listed.insert(node.get()).second) path.push_back({node});
    };
    for (Edge const& root : roots) add(root.function);
    for (std::size_t i = 0; i < path.size(); ++i) {
      bool branch = false;
      node_ptr<> const node = path[i].node;
      for (Edge const& edge : node->next_edges()) {
        if (edge.is_valid()) add(edge.function);
        branch = branch || leads_to_parameters_only(edge);
      }
      path[i].asked_once = branch && is_asked_once(*node);
      path[i].kept = branch && !path[i].asked_once;
    }
  }

  /// Removes every edge between path nodes. A node that is not kept may live on, as the origin of a tensor that a kept node
  /// saved; its own saved tensors are released here.
  void cut(std::vector<path_node> const& path) const {
    for (path_node const& p : path) {
      if (!p.kept) p.node->release_variables();
      for (std::size_t i = 0; i < p.node->next_edges().size(); ++i) {
        auto const known = found_.find(p.node->next_edges()[i].function.get());  // absent: a sink
        if (known != found_.end() && known->second.input) lead(*p.node, i, {});
      }
    }
  }

 private:
  std::unordered_map<Node*, reach> found_;
};

}  // namespace detail

}  // namespace chevron
