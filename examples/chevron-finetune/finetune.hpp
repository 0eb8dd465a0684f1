#pragma once

#include <optional>

#include <chevron/lower/program.hpp>

#include "chevron-finetune/decoder_config.hpp"
#include "chevron-finetune/options.hpp"
#include "chevron-finetune/samples.hpp"
#include "common/ranks.hpp"

/// \file
/// What is to be done, and one rank that does it.

namespace chevron::finetune {

struct task {
  finetune::options const& options;
  decoder_config const& model;
  proved_program training, evaluation;  ///< evaluation: the forwards of the training plan
  samples const& data;
  samples const* validation;  ///< null: none was given
};

/// Loads, trains, saves. Every rank of the job calls it once; global rank 0 speaks.
void finetune_on_rank(task const& what, train::rank_place const& where);

/// The body of both programs; `argv` must be that of `main`. \param gpus null in chevron-finetune
int start(int argc, char** argv, train::gpu_side const* gpus);

}  // namespace chevron::finetune
