#pragma once

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/model/stage_execution.hpp>

/// \file
/// An activation slot, and an operation: an instruction bound to its slots and methods.

namespace chevron::detail {

/// The tensors of one microbatch under way in one stage. From F on a slot holds the autograd graph (or the inputs, to recompute)
/// and, until a send or the next stage on this rank takes them, the outputs; inputs and outputs live on only if the graph has
/// saved them. From I on a slot holds the gradients that W needs, and the part of the graph that leads to parameters.
struct activation {
  stage_execution work;
  int lane = 0;             ///< the lane that F ran on
  bool drew = false;        ///< whether the computation under way drew random numbers
  at::Tensor loss;          ///< of the last stage's F, until the runner notes the loss
  tensors losses;           ///< the declared losses of the stage's F, until the runner notes them
  tensors outputs;          ///< of F, for the next stage
  tensors input_gradients;  ///< of B or I, for the previous stage

  /// The result for the next stage (`way` above 0) or for the previous one.
  tensors& result(int way) { return way > 0 ? outputs : input_gradients; }
};

class bound_program;
class stage_runner;

/// One turn of a rank: an instruction, or a fused pair, with the addresses of the slots that the turn reads and writes, and with
/// the methods of `stage_runner` and `bound_program` that carry it out. Bound once, for all steps.
struct operation {
  using method = void (bound_program::*)(operation const&);
  using tensor_method = void (bound_program::*)(operation const&, tensors& given);
  using computation = void (stage_runner::*)(operation const&, stage_call const&, tensors& given);

  instruction const* what = nullptr;      ///< of a fused pair: its F
  operation const* other_half = nullptr;  ///< of a fused pair: its B or I
  method turn = nullptr;                  ///< carries the operation out
  method own_turn = nullptr;              ///< the operation's turn without held W's before it (deferred_weights.hpp)

  activation* slot = nullptr;       ///< slot of a computation; for a send, slot of the computation whose result it sends
  tensors* takes = nullptr;         ///< the result in a slot that a send takes, or a computation from its neighbour on this rank
  tensors* gives = nullptr;         ///< the place in the slot for a computation's result for another stage
  tensor_method fetch = nullptr;    ///< of a computation: brings its inputs, or the gradients of its outputs
  tensor_method compute = nullptr;  ///< of a computation: computes, and measures where memory is watched
  computation body = nullptr;       ///< of a computation: the stage's F, B, I, W or R
  bool gives_loss = false;          ///< the last stage's F

  bool computes() const { return body != nullptr; }               ///< F, B, I, W or R
  int stage() const { return static_cast<int>(what->op.stage); }  ///< of a fused pair: of its F
  int micro_batch() const { return static_cast<int>(what->op.micro_batch); }
};

}  // namespace chevron::detail
