#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/job_options.hpp"
#include "gpt_size.hpp"

/// \file
/// What the command line says.

namespace chevron::train {

struct options : job_options {
  gpt_size model;
  std::vector<int> cut;  ///< how many layers each stage holds; empty: as even as can be
  std::vector<std::string> data;

  /// Bytes that the trained model writes at the end; nothing: at most `longest_sample`, in `sample_seconds`.
  std::optional<int> sample;
  static constexpr int longest_sample = 320;
  static constexpr int sample_seconds = 3;

  std::string trace;
  std::string timeline;
  std::string report;
  std::string profile;
};

/// Reads the command line. Prints help and ends with 0 where that is asked for; a `usage_error` with the remedy for anything it
/// cannot use.
options read_options(int argc, char** argv);

}  // namespace chevron::train
