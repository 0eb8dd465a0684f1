#pragma once

#include <optional>

#include <c10/core/ScalarType.h>

#include <chevron/run/stage/own_work.hpp>
#include <chevron/run/stage/slice_cuts.hpp>
#include <chevron/run/train/learning_rate.hpp>
#include <chevron/run/train/trainer_options.hpp>

#include "common/job_options.hpp"
#include "common/ranks.hpp"

/// \file
/// From a command line's flags to the options of a trainer.

namespace chevron::train {

/// The learning rate rises for a twentieth of the steps to `highest`, and falls along a cosine to a tenth.
inline warm_up_cosine learning_rate_of(double steps, double highest) {
  return {.highest = highest, .warm_up = steps / 20, .steps = steps, .lowest = highest / 10};
}

/// The options of a rank's trainer.
/// \param attention share of causal attention in the time of a sequence; `--attention` overrides it
inline trainer_options trainer_options_of(job_options const& o, rank_place const& where, double attention) {
  return {.clip_grad_norm = o.clip_grad_norm,
          .learning_rate = learning_rate_of(static_cast<double>(o.steps), o.learning_rate),
          .autocast = o.precision == precision::autocast ? std::optional(at::kBFloat16) : std::nullopt,
          .shard = o.shard_gradients ? sharding::gradients
                   : o.shard         ? sharding::optimizer
                                     : sharding::nothing,
          .overlap_gather = o.overlap_gather,
          .master_parameters = o.master_parameters,
          .slice_cuts = slices_by_cost(o.attention >= 0 ? o.attention : attention),
          .post_validation = o.post_validation,
          .own_actions = [](own_work const&) {},  // of a schedule's file: these programs have no work for X, Y and Z
          .device = where.device,
          .graphs = where.graphs};
}

}  // namespace chevron::train
