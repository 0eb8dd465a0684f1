#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include <chevron/checkpoint.hpp>
#include <chevron/multiprocess.hpp>

#include "support/cut_block.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

/// \file
/// Small jobs that several kinds of torture run.

namespace torture {

/// How a small job trains.
struct job_shape {
  std::string schedule = "ZB-H1";
  int pipeline_ranks = 2, replicas = 1, micro_batches = 4;
  bool post_validation = false;
  bool shares = false;     ///< the optimizer is sharded
  bool gradients = false;  ///< gradients, too
  int shards = 1;
  bool late = false;  ///< shares are gathered while the next step begins
};

inline chevron::trainer_setup setup_of(job_shape const& shape, chevron::transport& comm) {
  return {.program = chevron::lower(
              chevron::prove(small_model::plan_of(shape.schedule.c_str(), shape.pipeline_ranks, shape.micro_batches))),
          .transport = comm,
          .stages =
              [&comm, cut = shape.shards > 1](int number) {
                return cut ? build_cut_stage(number, small_model::width, comm) : small_model::build_stage(number);
              },
          .loss = small_model::mean_square,
          .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-3),
          .options = {.clip_grad_norm = shape.post_validation ? 0.0 : 1.0,
                      .shard = shape.gradients ? chevron::sharding::gradients
                               : shape.shares  ? chevron::sharding::optimizer
                                               : chevron::sharding::nothing,
                      .overlap_gather = shape.late,
                      .post_validation = shape.post_validation,
                      .stable_steps = 0}};
}

/// The batch of a step, of one replica.
inline small_model::batch batch_of(job_shape const& shape, long step, int replica) {
  return small_model::make_batch(2 * shape.micro_batches, static_cast<int>(7 * step + replica));
}

/// Forks the ranks of a job over Gloo; each runs `body`. For `run_apart`.
/// \param how all but the number of ranks
/// \returns the exit code
inline int over_gloo(job_shape const& shape, std::function<void(chevron::transport&)> const& body,
                     chevron::launch_options how = {}) {
  how.nproc = shape.pipeline_ranks * shape.replicas * shape.shards;
  return chevron::run_main(0, nullptr, [&](int, char**) {
    chevron::job const rank = chevron::launch(how);
    chevron::gloo_transport comm(rank.topology(shape.pipeline_ranks, shape.replicas, shape.shards), rank);
    body(comm);
    comm.close();
    return 0;
  });
}

}  // namespace torture
