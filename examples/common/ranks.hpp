#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/core/Device.h>

#include <chevron/jobs/launch.hpp>
#include <chevron/run/comm/transport.hpp>

#include "common/job_options.hpp"

/// \file
/// From options to ranks that train: threads, processes that are started here, or those that a launcher has started.

namespace chevron {
class graph_maker;
}

namespace chevron::train {

/// A rank, and where it is.
struct rank_place {
  transport& comm;
  std::string launcher;                      ///< for people: who started the ranks
  c10::Device device = c10::kCPU;            ///< where it computes
  std::shared_ptr<graph_maker> graphs = {};  ///< its own; empty: kernels are launched one by one
};
/// What each rank does.
using rank_body = std::function<void(rank_place const&)>;

/// What ranks on GPUs begin with. It takes libtorch_cuda, which costs a process 350 MB and time to start, so it is in a program
/// of its own, as chevron-train-nccl: chevron-train becomes that program when it is asked for `--backend nccl`.
struct gpu_side {
  void (*before_fork)(job_options const&);  ///< a `usage_error` where this machine has no GPU for each rank
  void (*run)(job_options const&, job const& rank, std::string const& launcher, rank_body const& body);
};

/// Looks who has started this process, and settles the backend. `argv` must be that of `main`: with `--backend nccl` or `copies`
/// and without `gpus` the process becomes the program of that name with `-nccl` behind it, or this throws a `usage_error`.
/// \throws usage_error where ranks and processes are not as many
/// \returns the launcher's environment
launch_environment look_for_launcher(job_options& o, char** argv, gpu_side const* gpus);

/// Runs the body on every rank. Everything that can be refused has been.
void run_ranks(job_options const& o, launch_environment const& told, gpu_side const* gpus, rank_body const& body);

}  // namespace chevron::train
