#pragma once

#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <chevron/run/stage/graph/graph_nodes.hpp>

/// \file
/// Walks over a stage's graph, and finds the nodes that lead to the stage's inputs, to parameters, or to both.

namespace chevron {

namespace detail {

/// Whether a node leads to the stage's inputs, to parameters, or to both.
struct reach {
  bool input = false;
  bool parameter = false;
};

/// A node that leads to the stage's inputs. If one of the node's edges leads to parameters only, `asked_once` or `kept` is set.
struct path_node {
  node_ptr<> node;
  bool asked_once = false;
  bool kept = false;
};

/// All nodes that `roots` lead to, directly or through other nodes, each node once.
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

/// Walks depth-first over the graph below `roots`, once, and records the `reach` of each node.
class graph_walk {
 public:
  graph_walk(Node* entry, edge_list const& roots) : entry_(entry) {
    for (Edge const& root : roots) visit(root.function.get());
  }

  reach of(Node* node) const { return found_.at(node); }

  bool leads_to_parameters_only(Edge const& edge) const {
    if (!edge.is_valid()) return false;
    reach const r = of(edge.function.get());
    return r.parameter && !r.input;
  }

  /// Appends all nodes below `roots` that lead to the stage's inputs to `path`.
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

  /// Removes every edge between nodes of `path`. A node that is not `kept` may outlive this call, as the origin of a tensor
  /// that a kept node saved; so the node's own saved tensors are released here.
  void cut(std::vector<path_node> const& path) const {
    for (path_node const& p : path) {
      if (!p.kept) p.node->release_variables();
      for (std::size_t i = 0; i < p.node->next_edges().size(); ++i) {
        auto const known = found_.find(p.node->next_edges()[i].function.get());  // not found: the edge leads to a sink
        if (known != found_.end() && known->second.input) lead(*p.node, i, {});
      }
    }
  }

 private:
  struct frame {
    Node* node;
    std::size_t next;
    reach so_far;
  };

  void visit(Node* start) {
    if (found_.contains(start)) return;
    open(start);
    while (!stack_.empty()) {
      frame& top = stack_.back();
      edge_list const& edges = top.node->next_edges();
      if (top.next == edges.size()) {
        reach const r = top.so_far;
        found_[top.node] = r;
        stack_.pop_back();
        if (!stack_.empty()) merge(stack_.back().so_far, r);
        continue;
      }
      Node* const child = edges[top.next++].function.get();
      if (child == nullptr) continue;
      if (auto const known = found_.find(child); known != found_.end()) {
        merge(top.so_far, known->second);
      } else {
        open(child);
      }
    }
  }

  /// Visits a node for the first time. A node without next edges is the entry, or a leaf that accumulates gradients.
  void open(Node* node) {
    bool const sink = node->next_edges().empty();
    stack_.push_back({node, 0, {node == entry_, sink && node != entry_}});
  }

  static void merge(reach& into, reach from) {
    into.input = into.input || from.input;
    into.parameter = into.parameter || from.parameter;
  }

  Node* entry_;
  std::unordered_map<Node*, reach> found_;
  std::vector<frame> stack_;
};

}  // namespace detail

}  // namespace chevron
