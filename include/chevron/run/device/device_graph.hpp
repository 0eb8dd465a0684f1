#pragma once

#include <functional>
#include <memory>
#include <string>

#include <chevron/run/device/compute_streams.hpp>

/// \file
/// Work that a device is asked for as a whole, instead of one kernel after the other.

namespace chevron {

/// A captured graph. A launch reads and writes the addresses recorded at its capture.
class device_graph {
 public:
  device_graph() = default;
  virtual ~device_graph() = default;
  device_graph(device_graph const&) = delete;
  device_graph& operator=(device_graph const&) = delete;

  /// Asks the main stream for all of it.
  virtual void launch() = 0;
};

/// Makes a rank's graphs. `cuda_graphs()` of cuda_graph.hpp is one.
class graph_maker {
 public:
  graph_maker() = default;
  virtual ~graph_maker() = default;
  graph_maker(graph_maker const&) = delete;
  graph_maker& operator=(graph_maker const&) = delete;

  /// Why it can do nothing for a rank that computes on these, as the end of a sentence; empty where it can.
  virtual std::string why_not(compute_streams const& on) const = 0;

  /// Graphs captured from here on are launched in the order in which they are captured, and may use each other's memory: what is
  /// freed while one is captured, a later one gets. Those captured before are gone.
  virtual void begin(compute_streams const& on) = 0;

  /// Notes what `work` asks of the main stream, and of the side stream in between, without its being done: no memory changes, and
  /// none that `work` made may be looked at. What it allocates is the graphs' for as long as any of them lives.
  /// \throws whatever `work` throws, and what it asked for that cannot be noted; then nothing is left of it
  virtual std::unique_ptr<device_graph> capture(compute_streams const& on, std::function<void()> const& work) = 0;
};

}  // namespace chevron
