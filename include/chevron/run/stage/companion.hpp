#pragma once

#include <cstddef>
#include <span>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/stage/stage_parts.hpp>

/// \file
/// The interface of tensors that a stage takes and gives beside its inputs and outputs.

namespace chevron::detail {

/// The parts of a stage's section: [first, last). Sections are numbered from 0.
struct section_parts {
  std::size_t number = 0;
  std::size_t first = 0, last = 0;
};

/// Tensors of one microbatch beside a stage's inputs and outputs, from F to B or W: of skip connections (skip.hpp), declared
/// losses (declared_losses.hpp), carries (stage_carries.hpp). `stage_execution` calls a stage's companions (companions.hpp) in
/// their order; a stage without skips, declared losses and carries has no companions.
class companion {
 public:
  virtual ~companion() = default;

  // F, and B or I, of the whole stage.

  /// Begins F. \param inputs all tensors that arrived; the companion's own are removed
  virtual void begin_forward(stage_call const&, [[maybe_unused]] tensors& inputs) {}
  /// Ends F. \param outputs the last section's outputs, detached; the companion's own are inserted
  virtual void end_forward(stage_call const&, [[maybe_unused]] tensors& outputs) {}
  /// Begins B or I. \param output_gradients all gradients that arrived; the companion's own are removed
  virtual void begin_backward(stage_call const&, [[maybe_unused]] tensors& output_gradients) {}
  /// Ends B or I. \param input_gradients of the first section; the companion's own are inserted
  virtual void end_backward(stage_call const&, [[maybe_unused]] tensors& input_gradients) {}

  // The forward of a section: in F `arrive` … `settle`, and again for a section that recomputes `begin_again` … `end_again`.

  virtual void arrive(stage_call const&, section_parts const&) {}  ///< before the section's F
  virtual void keep(section_parts const&) {}                       ///< stores what a second forward needs
  /// Checks that no stored tensor was changed in place since `keep`.
  /// \param change the error's sentence up to the tensor \throws usage_error if a tensor was changed
  virtual void check_kept(section_parts const&, [[maybe_unused]] char const* change) const {}
  virtual void begin_again(section_parts const&) {}               ///< before the second forward
  virtual void enter(section_parts const&, stage_graph&) {}       ///< connects tensors that get a gradient to the graph
  virtual void before(section_parts const&, forward_context&) {}  ///< before the parts' forwards: sets their arguments
  /// After the parts' forwards. \param given the losses that they passed to `add_loss`
  virtual void after(stage_call const&, section_parts const&, std::span<collected_losses::given const>) {}
  /// Adds tensors that get a gradient to the graph's outputs, at the end.
  virtual void leave(stage_call const&, section_parts const&, stage_graph&) const {}
  virtual void settle(section_parts const&) {}     ///< after the section's F
  virtual void end_again(section_parts const&) {}  ///< after the second forward

  // The backward of a section, through the graph that `enter` and `leave` connected.

  /// Whether the section's backward computes gradients for the companion, even if none of its inputs needs one.
  virtual bool gives_gradients(section_parts const&) const { return false; }
  /// Appends the gradients of the tensors that `leave` added to the gradients of the outputs.
  virtual void append_gradients(stage_call const&, section_parts const&, [[maybe_unused]] tensors& output_gradients) const {}
  /// Removes the gradients of the tensors that `enter` connected from the end of the gradients of the inputs.
  virtual void take_gradients(section_parts const&, [[maybe_unused]] tensors& input_gradients) {}
};

}  // namespace chevron::detail
