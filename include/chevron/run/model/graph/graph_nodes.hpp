#pragma once

#include <cstddef>
#include <memory>
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
/// Nodes of autograd's graph at which the backward of a stage begins, ends or is cut.

namespace chevron {

namespace detail {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Where a stage's graph begins: the node its inputs come from. Inputs are therefore no leaves, and a stage may change them in
/// place, as it may in the un-pipelined model.
struct graph_entry final : Node {
  variable_list gradients;
  variable_list apply(variable_list&& arriving) override {
    gradients = std::move(arriving);
    return {};
  }
};

/// Where W goes on: gives gradients that I has kept to the nodes that are to go on with them. The engine's own root wants all of
/// them defined; of a node with several outputs (an LSTM's) only some may have been used.
struct kept_gradients final : Node {
  variable_list kept;
  variable_list apply(variable_list&&) override { return std::move(kept); }
};

/// Stands in I for a node that only leads to parameters: what arrives here is kept for W.
struct gradient_sink final : Node {
  explicit gradient_sink(torch::autograd::InputMetadata const& like) {
    add_input_metadata(at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector()));  // one element of memory
  }
  variable_list apply(variable_list&&) override { return {}; }
};

/// Whether a node that leads to inputs and to parameters is asked once, for the gradients of both. LibTorch's own functions
/// compute only the gradients that they are asked for, so I and W may ask them in turn. The backward of a custom function, of a
/// node from outside of LibTorch, of a TorchScript graph or of a function with a post-hook may do more than compute gradients.
/// LibTorch's group norm, where its input is channels_last, writes the gradient of its input also if nobody asked for it, to
/// memory that is not there (2.11).
inline bool is_asked_once(Node& node) {
  std::string_view const type = typeid(node).name();
  return !node.post_hooks().empty() || !type.starts_with("N5torch8autograd9generated") ||
         type.find("NativeGroupNormBackward0") != std::string_view::npos;  // its header would cost seconds to compile
}

/// Lets a node lead elsewhere. An in-place change of a view holds its own operation inside, whose edges mirror the outer ones.
inline void lead(Node& node, std::size_t i, Edge const& to) {
  auto* const slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (slices != nullptr && slices->fn) slices->fn->next_edges()[i] = to;
  node.next_edges()[i] = to;
}

/// A node from which parameters are reached by a branch of its own, and what arrived at each of its inputs: W asks it for the
/// rest.
struct kept_node {
  node_ptr<> node;
  variable_list gradients;
};

/// Notes what arrives at a node when the engine is about to run it, after the user's own hooks. Kept per input number: a node
/// with several outputs in the forward (an LSTM) has one gradient for each.
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
