#pragma once

#include <functional>
#include <memory>
#include <string>

#include <chevron/run/device/compute_streams.hpp>

/// \file
/// Graphs of device work: captured once, launched as a whole.

namespace chevron {

/// A captured graph. A launch reads and writes the addresses recorded at its capture.
class device_graph {
 public:
  device_graph() = default;
  virtual ~device_graph() = default;
  device_graph(device_graph const&) = delete;
  device_graph& operator=(device_graph const&) = delete;

  /// Enqueues the graph on the main stream.
  virtual void launch() = 0;
};

/// Captures a rank's graphs. `cuda_graphs()` of cuda_graph.hpp returns one.
class graph_maker {
 public:
  graph_maker() = default;
  virtual ~graph_maker() = default;
  graph_maker(graph_maker const&) = delete;
  graph_maker& operator=(graph_maker const&) = delete;

  /// The reason why no graphs can be captured on these streams, as the end of a sentence; empty if they can.
  virtual std::string why_not(detail::compute_streams const& on) const = 0;

  /// Begins a set of graphs, and drops the set before. Graphs are launched in the order of their captures, and share memory: a
  /// later graph may use memory that was freed within an earlier one.
  virtual void begin(detail::compute_streams const& on) = 0;

  /// Captures the work that `work` enqueues on the main stream, and on the side stream in between, without running it: no memory
  /// changes, and memory that `work` allocated must not be read. The graphs own this memory as long as any of them lives.
  /// \throws the exception of `work`, or an error for work that cannot be captured; nothing of the graph is then left
  virtual std::unique_ptr<device_graph> capture(detail::compute_streams const& on, std::function<void()> const& work) = 0;
};

}  // namespace chevron
