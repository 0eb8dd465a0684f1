#pragma once

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/model/stage_execution.hpp>

/// \file
/// An activation slot, and an operation: an instruction bound to its slots and methods.

namespace chevron {

/// An activation slot. From F on it holds the graph of its microbatch (or the inputs, to compute it again) and, until they are
/// sent or taken by the next stage on this rank, the outputs; nothing else: inputs and outputs live on only where the graph saved
/// them. From I on it holds the gradients that W needs; the graph between is gone.
struct activation {
  stage_execution work;
  int lane = 0;       // that its F ran on
  bool drew = false;  // random numbers, in the computation under way
  at::Tensor loss;    // of the last stage's F, until it is noted
  tensors losses;     // that its stage declares, of F, until they are noted
  tensors outputs;
  tensors input_gradients;

  /// The result that goes to the next stage (`way` above 0), or to the stage before.
  tensors& result(int way) { return way > 0 ? outputs : input_gradients; }
};

class bound_program;
class stage_runner;

/// One turn of a rank: an instruction, or a fused pair, with the addresses of the slots that it reads and writes, and with the
/// methods of `stage_runner` and `bound_program` that carry it out. Bound once, for all steps.
struct operation {
  using method = void (bound_program::*)(operation const&);
  using tensor_method = void (bound_program::*)(operation const&, tensors& given);
  using computation = void (stage_runner::*)(operation const&, stage_call const&, tensors& given);

  instruction const* what = nullptr;      ///< of a fused pair: its F
  operation const* other_half = nullptr;  ///< of a fused pair: its B or I
  method turn = nullptr;                  ///< carries the operation out
  method own_turn = nullptr;              ///< the same without W's that go first (deferred_weights.hpp)

  activation* slot = nullptr;       ///< of a computation, and of the computation whose result a send takes
  tensors* takes = nullptr;         ///< the result in a slot that a send takes, or a computation from its neighbour on this rank
  tensors* gives = nullptr;         ///< where a computation leaves its result for another stage
  tensor_method fetch = nullptr;    ///< of a computation: brings the tensors that it works on
  tensor_method compute = nullptr;  ///< of a computation: computes, and measures where memory is watched
  computation body = nullptr;       ///< of a computation: what the stage does
  bool gives_loss = false;          ///< the last stage's F

  bool computes() const { return body != nullptr; }
  int stage() const { return static_cast<int>(what->op.stage); }
  int micro_batch() const { return static_cast<int>(what->op.micro_batch); }
};

}  // namespace chevron
