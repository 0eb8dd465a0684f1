#pragma once

#include <functional>
#include <optional>

#include <c10/core/ScalarType.h>
#include <torch/optim/adamw.h>

#include <chevron/run/stage/own_work.hpp>
#include <chevron/run/stage/slice_cuts.hpp>
#include <chevron/run/train/learning_rate.hpp>
#include <chevron/run/train/trainer_options.hpp>

#include "common/job_options.hpp"
#include "common/ranks.hpp"

/// \file
/// From a command line's flags to the options of a trainer.

namespace chevron::train {

/// The learning rate of each step, from 0: it rises to `--learning-rate` in `--warm-up` steps, and falls along `--decay` to
/// `--lowest-learning-rate` in the last of `--steps`. A function of the step's number alone, so a resumed run goes on with the
/// rates of its flags.
inline std::function<double(long)> learning_rate_of(job_options const& o) {
  auto const steps = static_cast<double>(o.steps);
  auto const shaped = [&](auto rate) {
    rate.highest = o.learning_rate;
    rate.warm_up = o.warm_up.value_or(steps / 20);
    rate.steps = steps;
    rate.lowest = o.lowest_rate.value_or(o.learning_rate / 10);
    return rate;
  };
  if (o.decay == "linear") return shaped(warm_up_linear{});
  return shaped(warm_up_cosine{});
}

/// AdamW with the rate and the betas of the command line. \param weight_decay of all parameters
inline torch::optim::AdamWOptions adamw_options_of(job_options const& o, double weight_decay) {
  return torch::optim::AdamWOptions(o.learning_rate).betas({o.betas[0], o.betas[1]}).weight_decay(weight_decay);
}

/// The options of a rank's trainer.
/// \param attention share of causal attention in the time of a sequence; `--attention` overrides it
inline trainer_options trainer_options_of(job_options const& o, rank_place const& where, double attention) {
  return {.clip_grad_norm = o.clip_grad_norm,
          .learning_rate = learning_rate_of(o),
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
