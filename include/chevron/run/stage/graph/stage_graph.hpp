#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/graph/custom_roots.hpp>
#include <chevron/run/stage/graph/graph_nodes.hpp>
#include <chevron/run/stage/graph/graph_walk.hpp>

/// \file
/// The backward of one stage and microbatch: in one call (B), or input gradients first (I) and weight gradients later (W).

namespace chevron::detail {

/// Whether a gradient of this tensor is sent back between stages. Sender and receiver decide by dtype, without a message.
inline bool carries_gradient(at::Tensor const& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
}

/// The autograd graph of one stage and one microbatch, from F to B or W. This class stores no inputs or outputs; they stay
/// allocated only if nodes of the graph saved them.
///
/// The split of the backward (Qi et al., arXiv 2401.10241; docs/inside/design.md, "How the backward is split"): nodes of the
/// graph that lead to the stage's inputs are *path* nodes, and I runs the engine over path nodes only. At a path node with
/// an edge to parameters only, a hook stores the arriving gradients for W; but if `is_asked_once`, the node computes the
/// gradients for this edge in I, and these are stored. Then I cuts all edges between path nodes. W runs the engine once
/// more, from all stored gradients together. Each product is computed once, in the order of a full backward, so gradients
/// have the same bits.
///
/// Not thread-safe.
class stage_graph {
 public:
  stage_graph() = default;
  stage_graph(stage_graph&&) = default;
  stage_graph& operator=(stage_graph&&) = default;

  /// Sets whether the backward also runs the custom functions that only outputs without a gradient lead to (custom_roots.hpp).
  void always_runs_custom_functions(bool on) { always_runs_custom_functions_ = on; }

  /// Detaches the inputs for the stage. If `differentiable`, connects floating-point inputs to the graph.
  /// \param seen_by_stage the detached inputs
  void enter(std::span<at::Tensor const> inputs, bool differentiable, tensors& seen_by_stage) {
    clear();
    seen_by_stage.clear();
    for (at::Tensor const& input : inputs) {
      at::Tensor seen = input.defined() ? input.detach() : input;
      if (differentiable && carries_gradient(seen)) {
        if (!entry_) entry_ = detail::make_node<detail::graph_entry>();
        torch::autograd::create_gradient_edge(seen, entry_);
      }
      seen_by_stage.push_back(std::move(seen));
    }
    inputs_ = entry_ ? entry_->num_inputs() : 0;
  }

  /// Detaches one more floating-point tensor and connects it to the graph. To be called after `enter`. The backward returns the
  /// tensor's gradient after those of the inputs; undefined if the tensor was not used.
  void follow(at::Tensor& more) {
    more = more.detach();
    if (!entry_) entry_ = detail::make_node<detail::graph_entry>();
    torch::autograd::create_gradient_edge(more, entry_);
  }

  /// Stores the edges from which the outputs' backward starts, not the outputs.
  void leave(std::span<at::Tensor const> outputs) {
    for (at::Tensor const& output : outputs) {
      if (!carries_gradient(output)) continue;
      ends_.push_back(output.requires_grad() ? torch::autograd::impl::gradient_edge(output) : detail::Edge());
    }
  }

  /// All nodes of the graph, each once.
  std::vector<detail::Node*> nodes() const { return detail::nodes_below(ends_); }

  /// The leaves whose gradients the backward would accumulate; inputs are no leaves. Walks the whole graph.
  tensors leaves() const {
    tensors found;
    for (detail::Node* const node : detail::nodes_below(ends_)) {
      if (auto const* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) found.push_back(leaf->variable);
    }
    return found;
  }

  /// B: adds to the parameters' gradients. Writes to `input_gradients` the gradients of the floating-point inputs, in order,
  /// with zeros for an unused input, and then the gradients of the tensors of `follow`.
  /// \param output_gradients undefined for an output that was not used
  void backward(std::span<at::Tensor const> output_gradients, tensors& input_gradients) {
    detail::edge_list roots;
    detail::variable_list gradients;
    collect_roots(output_gradients, roots, gradients);
    if (!roots.empty()) {
      engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
    }
    give_input_gradients(entry_ ? std::move(entry_->gradients) : detail::variable_list{}, input_gradients);
    clear();
  }

  /// I: writes the gradients of the inputs to `input_gradients`, and stores gradients for W. Without a differentiable input
  /// (stage 0), I computes nothing, and W runs the whole backward. Parameters are those of `backward`.
  void backward_input(std::span<at::Tensor const> output_gradients, tensors& input_gradients) {
    detail::edge_list roots;
    detail::variable_list gradients;
    collect_roots(output_gradients, roots, gradients);
    ends_.clear();

    detail::graph_walk walked(entry_.get(), roots);
    detail::edge_list path_roots;
    detail::variable_list path_gradients;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      detail::reach const r = walked.of(roots[i].function.get());
      if (r.input) {
        path_roots.push_back(std::move(roots[i]));
        path_gradients.push_back(std::move(gradients[i]));
      } else if (r.parameter) {
        weight_roots_.push_back(std::move(roots[i]));
        weight_gradients_.push_back(std::move(gradients[i]));
      }
    }

    detail::variable_list captured;
    if (!path_roots.empty()) {
      std::vector<detail::path_node> path;
      walked.collect_path(path_roots, path);
      detail::edge_list wanted;
      for (std::uint32_t i = 0; i < entry_->num_inputs(); ++i) wanted.emplace_back(entry_, i);
      for (detail::path_node const& p : path) {
        if (p.asked_once) divert(*p.node, walked, wanted);
        if (p.kept) kept_.push_back({p.node, {}});
      }
      for (std::size_t k = 0; k < kept_.size(); ++k) {
        kept_[k].node->add_pre_hook(std::make_unique<detail::keep_gradients>(&kept_, k));
      }
      captured = engine().execute(path_roots, path_gradients, /*keep_graph=*/true, /*create_graph=*/false,
                                  /*accumulate_grad=*/false, wanted);
      auto next = captured.begin() + entry_->num_inputs();
      for (auto const& of_node : diverted_) {
        for (std::size_t i = 0; i < of_node->next_edges().size(); ++i) of_node->kept.push_back(std::move(*next++));
      }
      walked.cut(path);
    }
    give_input_gradients(std::move(captured), input_gradients);
    entry_.reset();
  }

  /// W: adds to the parameters' gradients, computed from the gradients that I stored, and frees the rest of the graph.
  void backward_weight() {
    for (detail::kept_node& kept : kept_) {
      // Hooks ran in I; a second run would apply them twice.
      kept.node->pre_hooks().clear();
      kept.node->tensor_pre_hooks().clear();
      kept.node->retains_grad_hooks().clear();
      for (std::uint32_t i = 0; i < kept.gradients.size(); ++i) {
        weight_roots_.emplace_back(kept.node, i);
        weight_gradients_.push_back(std::move(kept.gradients[i]));
      }
    }
    kept_.clear();
    for (auto& of_node : diverted_) {
      at::Tensor const start = start_near(of_node->kept);
      of_node->add_input_metadata(start);
      weight_roots_.emplace_back(std::move(of_node), 0);
      weight_gradients_.push_back(start);
    }
    diverted_.clear();
    if (!weight_roots_.empty()) begin_weight();
    clear();
  }

  /// Calls `see` for each gradient that is stored from I to W.
  template <class See>
  void each_kept_gradient(See const& see) const {
    for (detail::kept_node const& kept : kept_) {
      for (at::Tensor const& gradient : kept.gradients) see(gradient);
    }
    for (auto const& of_node : diverted_) {
      for (at::Tensor const& gradient : of_node->kept) see(gradient);
    }
    for (at::Tensor const& gradient : weight_gradients_) see(gradient);
  }

  /// Frees the graph and all stored gradients.
  void clear() {
    entry_.reset();
    ends_.clear();
    kept_.clear();
    diverted_.clear();
    weight_roots_.clear();
    weight_gradients_.clear();
  }

 private:
  /// Redirects the edges to parameters of a node of `is_asked_once` to sinks; W starts from a new node, which gets these edges.
  /// \param wanted edges whose gradients I captures: the sinks are appended
  void divert(detail::Node& node, detail::graph_walk const& walked, detail::edge_list& wanted) {
    auto const onward = diverted_.emplace_back(detail::make_node<detail::kept_gradients>());
    onward->set_sequence_nr(node.sequence_nr());  // so that the engine runs it when it would run `node`
    for (std::size_t i = 0; i < node.next_edges().size(); ++i) {
      detail::Edge const edge = node.next_edge(i);
      if (!walked.leads_to_parameters_only(edge)) continue;
      onward->add_next_edge(edge);
      auto const sink = detail::make_node<detail::gradient_sink>(edge.function->input_metadata(edge.input_nr));
      wanted.emplace_back(sink, 0);
      detail::lead(node, i, {sink, 0});
    }
  }

  /// Runs the engine from all gradients that I has stored.
  void begin_weight() {
    auto const defined = [](at::Tensor const& g) { return g.defined(); };
    if (!std::all_of(weight_gradients_.begin(), weight_gradients_.end(), defined)) {
      at::Tensor const start = start_near(weight_gradients_);
      auto const root = detail::make_node<detail::kept_gradients>();
      root->add_input_metadata(start);
      root->set_next_edges(std::exchange(weight_roots_, {detail::Edge(root, 0)}));
      root->kept = std::exchange(weight_gradients_, {start});
    }
    engine().execute(weight_roots_, weight_gradients_, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }

  /// A placeholder gradient for a root that this class creates. The engine derives the root's device and stream from the
  /// placeholder; no node reads it.
  static at::Tensor start_near(detail::variable_list const& gradients) {
    auto const known = std::find_if(gradients.begin(), gradients.end(), [](at::Tensor const& g) { return g.defined(); });
    return at::empty({0}, known == gradients.end() ? at::TensorOptions() : known->options());
  }

  static torch::autograd::Engine& engine() { return torch::autograd::Engine::get_default_engine(); }

  void collect_roots(std::span<at::Tensor const> output_gradients, detail::edge_list& roots, detail::variable_list& gradients) {
    if (output_gradients.size() != ends_.size()) {
      throw usage_error("a stage gave " + std::to_string(ends_.size()) + " floating-point outputs but got " +
                        std::to_string(output_gradients.size()) + " gradients for them");
    }
    detail::edge_list without_gradient;
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      if (!ends_[i].is_valid()) continue;
      if (!output_gradients[i].defined()) {
        if (always_runs_custom_functions_) without_gradient.push_back(ends_[i]);
        continue;
      }
      roots.push_back(ends_[i]);
      gradients.push_back(output_gradients[i]);
    }
    if (!without_gradient.empty()) detail::start_at_custom_functions(without_gradient, roots, gradients);
  }

  void give_input_gradients(detail::variable_list arrived, tensors& input_gradients) {
    input_gradients.clear();
    if (!entry_) return;
    arrived.resize(entry_->num_inputs());
    for (std::uint32_t i = 0; i < entry_->num_inputs(); ++i) {
      if (i < inputs_ && !arrived[i].defined()) arrived[i] = entry_->input_metadata(i).zeros_like();
      input_gradients.push_back(std::move(arrived[i]));
    }
  }

  detail::node_ptr<detail::graph_entry> entry_;  // origin of the inputs; null without differentiable inputs
  std::uint32_t inputs_ = 0;                     // number of the entry's outputs that are inputs
  detail::edge_list ends_;                       // edges of floating-point outputs; invalid if an output needs no gradient
  std::vector<detail::kept_node> kept_;          // nodes that W runs, from I to W
  std::vector<detail::node_ptr<detail::kept_gradients>> diverted_;  // W's roots for nodes of `is_asked_once`
  detail::edge_list weight_roots_;                                  // edges of outputs that lead to parameters only
  detail::variable_list weight_gradients_;
  bool always_runs_custom_functions_ = false;
};

}  // namespace chevron::detail
