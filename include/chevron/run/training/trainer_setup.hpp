#pragma once

#include <functional>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/optimizer_factory.hpp>
#include <chevron/run/optimizer/trainer_options.hpp>

/// \file
/// What trainers and evaluators are made of.

namespace chevron {

/// Makes a stage, given its number. A trainer asks for the stages of its own rank only, one at a time in a process: seeding the
/// generator with the stage's number gives every layout the same weights.
using stage_builder = std::function<stage(int stage_number)>;

/// What a trainer is made of. Members without a default have to be given.
struct trainer_setup {
  proved_program program;         ///< what `lowered<…>` or `lower(prove(plan))` gives
  chevron::transport& transport;  ///< has to outlive the trainer
  stage_builder stages;           ///< called for each stage of this rank
  loss_function loss;             ///< outputs of the last stage, then targets, to the mean loss of a microbatch
  optimizer_factory optimizer;    ///< of this rank's parameters: `chevron::optimizer<torch::optim::AdamW>(3e-4)`
  trainer_options options = {};
};

/// What an evaluator without a trainer is made of: a model that is not trained here, such as a teacher or a reference. Members
/// without a default have to be given.
struct evaluator_setup {
  proved_program program;         ///< one that only runs forward, or one that trains: then its forwards
  chevron::transport& transport;  ///< has to outlive the evaluator
  stage_builder stages;           ///< called for each stage of this rank; parameters may need gradients, and get none
  loss_function loss = {};        ///< as a trainer has it; empty: there are outputs only
  trainer_options options = {};   ///< of these it uses `device`, `autocast`, `loss_weight`, `check_data` and `check_messages`
};

}  // namespace chevron
