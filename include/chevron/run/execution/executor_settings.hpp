#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/ScalarType.h>

#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// The settings of an executor, and the interface through which it prepares and sums gradients.

namespace chevron {

/// The arguments of a handler: one X, Y or Z, when the schedule runs it.
struct own_work {
  char letter;         ///< 'X', 'Y' or 'Z'
  int stage_number;    ///< of a stage on this rank
  int micro_batch;     ///< of this step, counted from 0
  long step;           ///< counted from 0
  chevron::stage& of;  ///< the stage itself, with its parameters and buffers
};

/// Runs one own action, on the rank's thread and stream, without autograd. An exception becomes the step's error, with rank and
/// action.
using own_handler = std::function<void(own_work const&)>;

namespace detail {

/// The part of a trainer's or evaluator's options that an executor reads.
struct executor_settings {
  std::uint64_t seed = 0;                         ///< of stages' random numbers (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};    ///< dtype of autocast around stages and loss
  std::shared_ptr<compute_streams> streams = {};  ///< the device's streams; empty: the CPU, one computation at a time
  std::shared_ptr<graph_maker> graphs = {};       ///< captures runs that repeat; empty: no run is captured
  int deferred_weights = 0;      ///< the largest number of W's held back until this rank would wait (deferred_weights.hpp)
  bool check_messages = false;   ///< messages carry a checksum (message_checksum.hpp); the same on all ranks
  int lowest_trained = 0;        ///< stages before this one have no parameter that needs a gradient; the same on all ranks
  own_handler own_actions = {};  ///< runs X, Y and Z
  /// Called in each run, before the rank's first B or I, which needs the microbatches' weights; F's need none. Empty: not called.
  std::function<void()> before_backward = {};
  /// Waits until this replica has a stage's parameters whole, before the stage's first computation. Empty: parameters are whole
  /// between two steps.
  std::function<void(int stage)> unshard = {};
};

/// The gradients of one rank's stages, which the executor fills by running B and W.
class gradient_store {
 public:
  virtual ~gradient_store() = default;

  /// Sets each `.grad` of a stage to the buffer that collects the gradient. Called before each B and W, which add to `.grad`, and
  /// before each I, in which a custom function may add to `.grad` itself.
  virtual void attach(int stage) = 0;
  /// Attaches all stages, before their computations are captured: a graph records addresses.
  virtual void attach_all() = 0;
  /// Starts the sums of a stage's gradients over the replicas. Called once the stage's gradients are complete on this replica.
  virtual void start_sums(int stage) = 0;
};

}  // namespace detail
}  // namespace chevron
