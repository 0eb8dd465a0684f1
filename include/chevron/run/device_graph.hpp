#pragma once

#include <functional>
#include <memory>
#include <string>

#include <chevron/run/lanes.hpp>

/// \file
/// Work that a device is asked for as a whole, instead of one kernel after the other.

namespace chevron {

/// What was noted once, at the addresses of then.
class device_graph {
 public:
  device_graph() = default;
  virtual ~device_graph() = default;
  device_graph(device_graph const&) = delete;
  device_graph& operator=(device_graph const&) = delete;

  /// Asks lane 0 for all of it.
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
  virtual std::string why_not(lanes const& on) const = 0;

  /// Graphs captured from here on are launched in the order in which they are captured, and may use each other's memory: what is
  /// freed while one is captured, a later one gets. Those captured before are gone.
  virtual void begin(lanes const& on) = 0;

  /// Notes what `work` asks of lane 0, and of lane 1 in between, without its being done: no memory changes, and none that `work`
  /// made may be looked at. What it allocates is the graphs' for as long as any of them lives.
  /// \throws whatever `work` throws, and what it asked for that cannot be noted; then nothing is left of it
  virtual std::unique_ptr<device_graph> capture(lanes const& on, std::function<void()> const& work) = 0;
};

}  // namespace chevron
