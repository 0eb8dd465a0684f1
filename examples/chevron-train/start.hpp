#pragma once

#include <chevron/run/launch/launch.hpp>

#include "job.hpp"

/// \file
/// From a command line to ranks that train.

namespace chevron::train {

/// What ranks on GPUs begin with. It takes libtorch_cuda, which costs a process 350 MB and time to start, so it is in a program
/// of its own, chevron-train-nccl: chevron-train becomes that program when it is asked for `--backend nccl`.
struct gpu_side {
  void (*before_fork)(options const&);  ///< a `usage_error` where this machine has no GPU for each rank
  void (*train)(task&, chevron::job const&);
};

/// The body of both programs; `argv` must be that of `main`. \param gpus null in chevron-train
int start(int argc, char** argv, gpu_side const* gpus);

}  // namespace chevron::train
