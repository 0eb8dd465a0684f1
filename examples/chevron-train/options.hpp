#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt_size.hpp"

/// \file
/// What the command line says.

namespace chevron::train {

enum class backend { threads, gloo, nccl };
enum class precision { float32, bfloat16, autocast };

struct options {
  std::string schedule = "1F1B";
  std::string schedule_text;  ///< of a schedule that comes from a file
  int ranks = 2;
  int chunks = 0;  ///< stages on a rank; 0: what the schedule's placement has, or 2 where that is open
  int micro_batches = 4;
  int replicas = 2;

  train::backend backend = train::backend::threads;
  bool backend_given = false;
  int nproc = 0;            ///< 0: not given
  bool share_gpus = false;  ///< more ranks than GPUs
  bool cuda_graph = false;  ///< computations are captured and launched as graphs
  double timeout = 300;

  gpt_size model;
  int micro_batch_size = 4;
  long steps = 300;
  std::uint64_t seed = 1;
  double learning_rate = 3e-3;
  double clip_grad_norm = 1;
  bool post_validation = false;
  bool recompute = false;
  train::precision precision = train::precision::float32;
  std::vector<std::string> data;

  std::string checkpoint;    ///< folder; empty: none is kept
  long save_every = 0;       ///< steps; 0: after the last one only
  int keep_checkpoints = 0;  ///< 0: all
  bool resume = false;
  double stop_after = 0;  ///< seconds; 0: no limit

  std::string metrics;
  std::string trace;
  std::string timeline;
  std::string report;
  std::string profile;

  int world() const { return ranks * replicas; }
};

/// Reads the command line. Prints help and ends with 0 where that is asked for; a `usage_error` with the remedy for anything it
/// cannot use.
options read_options(int argc, char** argv);

}  // namespace chevron::train
