#pragma once

#include <string>
#include <utility>
#include <vector>

#include <chevron/schedule.hpp>

#include "common/job_options.hpp"

/// \file
/// From options to programs that were proved. Nothing gets through that breaks a law.

namespace chevron::train {

/// The training plan that the options ask for.
/// \throws usage_error, in the words of the compile-time gate, for one that breaks a law
proved_plan proved_by_options(job_options const& o);

/// With `--slices auto`: chooses how many, once it is known what the model computes. Of 1, 2, 4 and 8 slices, as far as sequences
/// have tokens for them, the fewest whose step is predicted to take at most 2 % more than the shortest: each slice costs
/// messages, and shorter products, which the prediction leaves aside.
/// \param attention the share of a sequence's time that is causal attention
/// \throws usage_error for a schedule that takes no slices
void choose_slices(job_options& o, double attention);

/// With `--schedule auto`: the most chunks that a rank may hold.
int chunk_limit(job_options const& o);

/// A line of a program's header for a schedule with own actions, for which these programs run nothing; empty without them.
std::vector<std::pair<std::string, std::string>> facts_of_own_actions(plan_view const& plan);

/// Its program, whose laws are looked at once more: messages match, slots are free when they are used.
proved_program lower_and_check(proved_plan const& from);

}  // namespace chevron::train
