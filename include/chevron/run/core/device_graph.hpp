#pragma once

#include <functional>
#include <memory>
#include <string>

#include <chevron/run/core/compute_streams.hpp>

/// \file
/// Graphs of device work: captured once, launched as a whole.

namespace chevron {

/// A captured graph. A launch reads and writes the memory addresses that the capture recorded.
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

  /// The reason why no graphs can be captured on these streams, as the end of a sentence; empty if graphs can be captured.
  virtual std::string why_not(detail::compute_streams const& on) const = 0;

  /// Begins a set of graphs, and drops the previous set. The graphs of a set are launched in the order of their captures, since
  /// they share memory: a later graph may use memory that was freed within an earlier graph.
  virtual void begin(detail::compute_streams const& on) = 0;

  /// Calls `work` and captures the device work that `work` enqueues on the main stream, and in between on the side stream. The
  /// device work does not run: no memory changes, and memory that `work` allocated must not be read before a launch. The set's
  /// graphs own this memory until the last graph is destroyed.
  /// \throws the exception of `work`, or an error if the device work cannot be captured; no part of the graph remains
  virtual std::unique_ptr<device_graph> capture(detail::compute_streams const& on, std::function<void()> const& work) = 0;
};

}  // namespace chevron
