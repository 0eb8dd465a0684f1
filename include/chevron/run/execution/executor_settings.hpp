#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/ScalarType.h>

#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/model/own_work.hpp>

/// \file
/// How an executor computes.

namespace chevron {

struct executor_settings {
  std::uint64_t seed = 0;                         ///< of what stages draw (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};    ///< stages and loss run under autocast to this
  std::shared_ptr<compute_streams> streams = {};  ///< what to compute on; empty: the CPU, one thing after the other
  std::shared_ptr<graph_maker> graphs = {};       ///< captures steady runs; empty: none are captured
  int deferred_weights = 0;      ///< so many W's may be held back until this rank would wait (deferred_weights.hpp)
  bool check_messages = false;   ///< messages go with a checksum (message_checksum.hpp); the same on all ranks
  int lowest_trained = 0;        ///< no stage before it has a parameter that needs a gradient; the same on all ranks
  own_handler own_actions = {};  ///< runs X, Y and Z
  /// Called in each run, before the rank's first B or I, which needs the microbatches' weights; F's need none. Empty: not called.
  std::function<void()> before_backward = {};
};

}  // namespace chevron
