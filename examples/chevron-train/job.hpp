#pragma once

#include <optional>
#include <string>

#include <chevron/lower/program.hpp>

#include "corpus.hpp"
#include "options.hpp"

/// \file
/// What is to be done: the options, the text, and the proved programs.

namespace chevron::train {

/// The programs of a job. Nothing gets in here that breaks a law.
struct programs {
  proved_program training;
  proved_program evaluation;  ///< the forwards of the training plan
  proved_program sampling;    ///< the same for one microbatch
  bool proved_while_compiling = false;
};

/// Works out, proves and lowers what the options ask for. The default schedule at its default size is a constant of this program.
/// A broken law is a `usage_error` in the words of the compile-time gate.
programs make_programs(options const& o);

struct task {
  train::options options;
  train::corpus text;
  std::optional<train::programs> programs;  ///< set once the options are known
};

}  // namespace chevron::train
