#pragma once

#include <chevron/schedule.hpp>

#include "common/job_options.hpp"

/// \file
/// From options to programs that were proved. Nothing gets through that breaks a law.

namespace chevron::train {

/// The training plan that the options ask for.
/// \throws usage_error, in the words of the compile-time gate, for one that breaks a law
proved_plan proved_by_options(job_options const& o);

/// With `--schedule auto`: the most chunks that a rank may hold.
int chunk_limit(job_options const& o);

/// Its program, whose laws are looked at once more: messages match, slots are free when they are used.
proved_program lower_and_check(proved_plan const& from);

}  // namespace chevron::train
