#pragma once

#include <cstddef>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <chevron/run/core/libtorch.hpp>

/// \file
/// Nodes of autograd's graph where the backward of a stage begins, ends or is cut.

namespace chevron {

namespace detail {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// The node of a stage's graph that is the origin of the stage's inputs. So inputs are no leaves, and a stage may change inputs
/// in place, as in the un-pipelined model.
struct graph_entry final : Node {
  variable_list gradients;
  variable_list apply(variable_list&& arriving) override {
    gradients = std::move(arriving);
    return {};
  }
};

/// A root of W: passes gradients that I kept to the next nodes. The engine's own root requires all gradients to be defined, but
/// some are undefined if a node has several outputs (an LSTM) of which some were not used.
struct kept_gradients final : Node {
  variable_list kept;
  variable_list apply(variable_list&&) override { return std::move(kept); }
};

/// Replaces, in I, a node that leads only to parameters: the engine captures the gradient that arrives at the sink, for W.
struct gradient_sink final : Node {
  explicit gradient_sink(torch::autograd::InputMetadata const& like) {
    add_input_metadata(at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector()));  // one element of memory
  }
  variable_list apply(variable_list&&) override { return {}; }
};

/// Whether a node that leads to inputs and to parameters must compute both gradients in one call. LibTorch's own functions
/// compute only the requested gradients, so I and then W may call them. Nodes that must be called once are backwards of custom
/// functions, nodes from outside of LibTorch, TorchScript graphs and functions with a post-hook, which may do more than compute
/// gradients; and LibTorch's group norm, which for a channels_last input also writes an input gradient that was not requested,
/// to memory that is not allocated (LibTorch 2.11).
inline bool is_asked_once(Node& node) {
  std::string_view const type = typeid(node).name();
  return !node.post_hooks().empty() || !type.starts_with("N5torch8autograd9generated") ||
         type.find("NativeGroupNormBackward0") != std::string_view::npos;  // its header would cost seconds to compile
}

/// Changes the target of a node's i-th edge; in the node of an in-place change of a view (`CopySlices`) also the edge of the
/// inner node, which has the same edges.
inline void lead(Node& node, std::size_t i, Edge const& to) {
  auto* const slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (slices != nullptr && slices->fn) slices->fn->next_edges()[i] = to;
  node.next_edges()[i] = to;
}

/// A node with an edge to parameters only, and the gradients that arrived at each input of the node: W runs the node on them.
struct kept_node {
  node_ptr<> node;
  variable_list gradients;
};

/// Stores the gradients that arrive at a node, just before the engine runs the node and after the user's hooks: one for each
/// input of the node, which is one for each output of the forward operator (an LSTM has several).
struct keep_gradients final : torch::autograd::FunctionPreHook {
  std::vector<kept_node>* kept;
  std::size_t index;
  keep_gradients(std::vector<kept_node>* list, std::size_t position) : kept(list), index(position) {}
  variable_list operator()(variable_list const& arriving) override {
    (*kept)[index].gradients = arriving;
    return arriving;
  }
};

}  // namespace detail

}  // namespace chevron
