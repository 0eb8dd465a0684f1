#pragma once

#include <functional>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// The arguments of trainers and evaluators.

namespace chevron {

/// Builds a stage, given its number. A trainer calls the builder for each stage of its rank, one call at a time in a process: a
/// builder that seeds the generator with the stage's number creates the same weights on any number of ranks.
using stage_builder = std::function<stage(int stage_number)>;

/// The arguments of a trainer. Members without a default have to be given.
struct trainer_setup {
  proved_program program;         ///< of `lowered<…>` or `lower(prove(plan))`
  chevron::transport& transport;  ///< must outlive the trainer
  stage_builder stages;           ///< called for each stage of this rank
  loss_function loss;             ///< returns a microbatch's mean loss, given the last stage's outputs, then targets
  optimizer_factory optimizer;    ///< makes the optimizer: `chevron::optimizer<torch::optim::AdamW>(3e-4)`
  trainer_options options = {};   ///< see trainer_options.hpp
};

/// The arguments of an evaluator without a trainer, for a model that is not trained here, such as a teacher or a reference.
/// Members without a default have to be given.
struct evaluator_setup {
  proved_program program;         ///< a program that only runs forward, or a training program, whose forwards run
  chevron::transport& transport;  ///< must outlive the evaluator
  stage_builder stages;           ///< called for each stage of this rank; parameters may need gradients, and get none
  loss_function loss = {};        ///< as of a trainer; empty: the evaluator can only compute outputs
  trainer_options options = {};   ///< used: `device`, `autocast`, `loss_weight`, `slice_cuts`, `check_data`
};

}  // namespace chevron
