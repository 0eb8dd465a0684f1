#pragma once

#include <string>
#include <vector>

/// \file
/// A scenario: a small job, and the fault of one of its ranks.

namespace torture {

struct scenario {
  std::string schedule;  ///< a name of the catalogue
  std::string backend;   ///< `gloo`: forked processes; `threads`
  int replicas = 1;
  bool post_validation = false;
  bool shares = false;     ///< the optimizer is sharded
  bool gradients = false;  ///< gradients, too
  bool late = false;       ///< shares are gathered while the next step begins
  bool saves = false;  ///< a checkpoint after each step
  bool evaluates = false;  ///< an evaluation after each step: the loss where `rank` is even, outputs where it is odd
  bool cut = false;    ///< each stage is cut over two shards, which sum over each other in every F and B
  int rank = 0;        ///< where the fault strikes; global
  std::string point;   ///< as in fault_points.hpp: `step 2, before 1F0`, `joining`
  std::string kind;    ///< `kill`, `throw`, …

  int shards() const { return cut ? 2 : 1; }
  /// As CHEVRON_FAULT takes it.
  std::string fault() const { return "rank " + std::to_string(rank) + ", " + point + ": " + kind; }
  /// In one line, which `scenario_of` reads.
  std::string text() const;
};

/// \throws std::runtime_error for a line that `text` did not write
scenario scenario_of(std::string const& line);

constexpr int pipeline_ranks = 4, micro_batches = 4;
/// Steps are short; the fault strikes in the middle one.
constexpr long job_steps = 5, struck_step = 2;

/// Each action of one step of each schedule of the catalogue that trains, with each kind of fault, over Gloo and in threads; then
/// some of them with replicas, sharded, with shards, with post-validation and checkpoints; then gathers of shares, evaluations,
/// joining, saving and leaving.
std::vector<scenario> all_scenarios();

}  // namespace torture
