#pragma once

#include "common/ranks.hpp"
#include "job.hpp"

/// \file
/// One rank of a job.

namespace chevron::train {

/// Trains, evaluates, compares with the prediction and writes a sample. Every rank of the job calls it once; global rank 0
/// speaks.
void train_on_rank(task const& what, rank_place const& where);

}  // namespace chevron::train
