#pragma once

/// \file
/// The interface through which the executor prepares and sums gradients.

namespace chevron::detail {

/// The gradients of one rank's stages, to which B and W add.
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

}  // namespace chevron::detail
