#pragma once

/// \file
/// What the executor asks of whoever holds the gradients.

namespace chevron {

/// The gradients of one rank's stages, which the executor fills by running B and W.
class gradient_store {
 public:
  virtual ~gradient_store() = default;

  /// A B or W is about to add to this stage's gradients, or an I in which a custom function may do so itself: each `.grad` must
  /// be the buffer that collects them.
  virtual void attach(int stage) = 0;
  /// The same for all stages, before their computations are captured: a graph records addresses.
  virtual void attach_all() = 0;
  /// The stage's gradients of this step are complete on this replica: their sums over the replicas may start.
  virtual void start_sums(int stage) = 0;
};

}  // namespace chevron
