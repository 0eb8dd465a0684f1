#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/plan/profile.hpp>

#include "chevron-finetune/decoder_config.hpp"
#include "chevron-finetune/options.hpp"

/// \file
/// Bytes that each pipeline rank of a job needs, computed from the model's sizes before anything is loaded.

namespace chevron::finetune {

/// Bytes of one pipeline rank, of its fullest shard and replica.
struct rank_bytes {
  std::vector<int> stages;
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;          ///< with `--shard gradients`: of them, what exists at the fullest moment of a step
  std::int64_t state = 0;              ///< of the optimizer, with masters and copies of `--post-validation`
  std::int64_t activations = 0;        ///< at the fullest moment of a step
  std::int64_t carried_gradients = 0;  ///< of sequences in slices: of the keys and values of one microbatch
  int in_flight = 0;                   ///< most chunks whose activations exist at once

  std::int64_t sum() const { return parameters + gradients + state + activations + carried_gradients; }
};

/// Bytes of a job: of each stage, and of each pipeline rank.
struct job_bytes {
  std::vector<std::int64_t> parameters, state;  ///< by stage; of a state that replicas share, one replica's part
  std::vector<std::int64_t> carried_gradients;  ///< by stage
  std::vector<stage_bytes> slices;              ///< by slice of a microbatch, at least one
  std::vector<std::int64_t> slice_ends;         ///< in tokens
  std::vector<rank_bytes> ranks;

  std::int64_t longest_slice() const {
    std::int64_t most = 0, begin = 0;
    for (std::int64_t const end : slice_ends) {
      most = std::max(most, end - begin);
      begin = end;
    }
    return most;
  }
};

/// Computes the bytes of a job by the formulas of docs/reference/model-costs.md.
/// \param o with a context
/// \param plan of training
job_bytes bytes_of(options const& o, decoder_config const& c, plan_view const& plan);

/// A table with a row for each pipeline rank, in bytes with units of 1024; and notes.
std::string table_of(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes);
/// The same as JSON: objects `ranks` and lists by stage, in bytes.
std::string json_of(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes);

/// Refuses a job of which a rank needs more memory than it has (`--memory`).
/// \throws usage_error with rank, bytes and flags that suffice, as far as trying them one by one finds such flags
void check_memory(options const& o, decoder_config const& c, job_bytes const& bytes);

}  // namespace chevron::finetune
