#pragma once

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage_execution.hpp>

/// \file
/// An activation slot, and an operation: an instruction bound to its slots and methods.

namespace chevron::detail {

/// An activation slot: the data of one microbatch in one stage. From F on, a slot contains the autograd graph (or the inputs,
/// to recompute) and, until a send or the next stage on this rank consumes them, the outputs; afterwards inputs and outputs are
/// freed unless the graph saved them. From I on, a slot contains the gradients that W needs, and the part of the graph that
/// leads to parameters.
struct activation {
  stage_execution work;
  int lane = 0;             ///< the lane on which F ran
  bool drew = false;        ///< whether the current computation drew random numbers
  at::Tensor loss;          ///< the loss from the last stage's F, until the runner collects it
  tensors losses;           ///< the stage's declared losses from F, until the runner collects them
  tensors outputs;          ///< outputs of F, for the next stage
  tensors input_gradients;  ///< results of B or I, for the previous stage

  /// The result for the next stage (`way` above 0) or for the previous stage.
  tensors& result(int way) { return way > 0 ? outputs : input_gradients; }
};

class executor;

/// An instruction or a fused pair of a rank's program, with the addresses of the slots that it reads and writes, and with the
/// methods of `executor` that execute it. Bound once, for all steps.
struct operation {
  using method = void (executor::*)(operation const&);

  instruction const* what = nullptr;      ///< the instruction; of a fused pair, the F
  operation const* other_half = nullptr;  ///< the B or I of a fused pair; otherwise null
  method turn = nullptr;                  ///< executes the operation
  method work = nullptr;                  ///< sends, posts, waits …; null for a computation

  activation* slot = nullptr;  ///< slot of a computation; for a send, slot of the computation whose result is sent
  tensors* takes = nullptr;    ///< in a slot: the result that a send, or a neighbouring stage on this rank, consumes
  tensors* gives = nullptr;    ///< where in the slot a computation writes its result for another stage
  tensors* given = nullptr;    ///< of a computation: its inputs, or the gradients of the outputs
  method fetch = nullptr;      ///< of a computation: gets `given`
  bool measured = false;       ///< whether `memory_meter` measures the computation
  bool gives_loss = false;     ///< whether this is the last stage's F

  /// Whether this is F, B, I, W or R.
  bool computes() const { return is_compute(what->op.kind) && !is_own(what->op.kind); }
  int stage() const { return static_cast<int>(what->op.stage); }  ///< of a fused pair, the F's stage
  int micro_batch() const { return static_cast<int>(what->op.micro_batch); }
};

}  // namespace chevron::detail
