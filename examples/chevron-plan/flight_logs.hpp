#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <chevron/plan/action.hpp>

/// \file
/// What ranks left when their job failed: the files `rank-N.json` of CHEVRON_FLIGHT_LOGS, read.

namespace plan_program {

/// One action as it ran, in nanoseconds of the rank's steady clock.
struct ring_action {
  long step = 0;
  chevron::action op{};
  std::int64_t reached = 0, start = 0;
  std::optional<std::int64_t> end;  ///< none: it was under way
};

/// What a rank waited for when it heard of the failure.
struct ring_wait {
  int peer = -1;  ///< global rank; -1: for all
  long step = -1;
  std::string action;                   ///< `2RECV_F1`, `sum of gradients`
  std::optional<chevron::action> what;  ///< the same, where it is an action
  std::string text;
  std::int64_t until = 0;
};

/// The failure, as the rank was told.
struct ring_failure {
  int code = 0;
  int rank = -1;  ///< global; -1: none in particular
  long step = -1;
  std::string action;
  std::string reason;
  bool operator==(ring_failure const&) const = default;
};

struct flight_log {
  std::string file;
  int rank = 0, pipeline_ranks = 1, replicas = 1, shards = 1;
  std::string schedule;
  int micro_batches = 0, slices = 1, chunks = 0;
  bool forward_only = false;
  std::vector<std::string> plan;  ///< by pipeline rank, as CSV; empty where it was too large, or the rank never had one
  ring_failure told;
  std::optional<ring_wait> waiting;
  std::int64_t written = 0, wall_clock_ahead = 0;
  long left_out = 0;  ///< actions before the first of `actions` that the file has no room for
  std::vector<ring_action> actions;

  int world() const { return pipeline_ranks * replicas * shards; }
  /// Of a global rank: (replica × pipeline ranks + pipeline rank) × shards + shard.
  int pipeline_rank_of(int global_rank) const { return global_rank / shards % pipeline_ranks; }
  int shard_of(int global_rank) const { return global_rank % shards; }
  /// The first rank of its pipeline, with the same shard.
  int first_of_pipeline(int global_rank) const { return global_rank - pipeline_rank_of(global_rank) * shards; }
  std::int64_t written_on_the_wall() const { return written + wall_clock_ahead; }
};

/// What was read, and what is to be said of what was not.
struct flight_logs {
  std::vector<std::optional<flight_log>> by_rank;  ///< global rank
  std::vector<std::string> remarks;                ///< on files that were left aside
  flight_log const& any() const;
};

/// `2F1`, `2RECV_F1`, `OPTIMIZER_STEP`, with several slices `2F1.0`; nothing if it is no action.
std::optional<chevron::action> action_of(std::string_view text, int slices);

/// Reads files, or all `rank-*.json` of a folder.
/// \throws usage where nothing is to be read, a file is no flight log, or they are of different jobs
flight_logs read_flight_logs(std::vector<std::string> const& named);

}  // namespace plan_program
