#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chevron-finetune/adapters.hpp"
#include "common/job_options.hpp"

/// \file
/// What the command line says.

namespace chevron::finetune {

struct options : train::job_options {
  std::string model;                    ///< folder
  std::vector<std::string> data;        ///< files of tokens
  std::vector<std::string> validation;  ///< the same, never trained on
  std::string out;                      ///< folder
  std::string out_dtype;                ///< of the saved tensors; empty: as the model's folder says
  std::string logits;                   ///< file; empty: none are written
  double weight_decay = 0.1;
  finetune::adapters adapters;   ///< rank 0: the model itself is trained
  std::string windows;           ///< stream or packed; empty: packed if a file of --data has a mask
  std::optional<double> epochs;  ///< of which `steps` is computed; nullopt: `steps` is given
  long validate_every = 0;       ///< steps between two validations while training; 0: none
  long validation_batches = 16;  ///< most batches, each as large as a step's, of one validation; 0: all
  std::string profile;           ///< file of measured times and bytes; empty: none is written
  std::string dry_run;           ///< `text` or `json`: print each rank's bytes, and train nothing; empty: train
  std::int64_t memory = 0;       ///< bytes that each rank has; 0: not known
};

/// Reads the command line. Prints help and ends with 0 where that is asked for; a `usage_error` with the remedy for anything it
/// cannot use.
options read_options(int argc, char** argv);

}  // namespace chevron::finetune
