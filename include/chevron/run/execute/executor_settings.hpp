#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/ScalarType.h>

#include <chevron/run/comm/shard_watch.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/device_graph.hpp>
#include <chevron/run/stage/own_work.hpp>

/// \file
/// The settings of an executor.

namespace chevron::detail {

/// The part of a trainer's or evaluator's options that an executor reads.
struct executor_settings {
  std::uint64_t seed = 0;                         ///< seed of stages' random numbers (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};    ///< dtype of autocast around stages and loss
  std::shared_ptr<compute_streams> streams = {};  ///< the device's streams; empty: the CPU, one computation at a time
  std::shared_ptr<graph_maker> graphs = {};       ///< captures computations as graphs; empty: no graphs
  int lowest_trained = 0;        ///< stages before this one have no parameter that needs a gradient; the same on all ranks
  own_handler own_actions = {};  ///< runs X, Y and Z
  /// Called in each run before the rank's first B or I, which needs the microbatches' weights; F's do not. Empty: not called.
  std::function<void()> before_backward = {};
  /// Called before a stage's first computation; waits until all of the stage's parameters are gathered on this replica. Empty:
  /// they are gathered before the step begins.
  std::function<void(int stage)> unshard = {};
  /// Records what stages take and the gradients that they give back, for a comparison over shards; null: nothing is recorded.
  shard_watch* watch = nullptr;
};

}  // namespace chevron::detail
