#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "recorder_dumps.hpp"

/// \file
/// The first cause of a hang, from the dumps of PyTorch's flight recorder.

namespace plan_program {

/// An operation of a rank: an index into the rank's `operations`.
struct operation_place {
  int rank = -1;
  int index = -1;
  bool operator==(operation_place const&) const = default;
};

/// One arrow of the wait-for graph: an operation that `from` has called cannot run before rank `to` has gone on.
struct recorded_wait {
  operation_place from;
  int to = -1;
  bool called = false;  ///< `to` has called its side, too, behind operations that must run before
};

enum class hang_cause {
  none,         ///< no operation is pending
  running,      ///< all pending operations were called by all of their ranks
  patient,      ///< ranks wait, for no longer than earlier in this job
  absent_rank,  ///< ranks wait for a rank without a dump
  silent_rank,  ///< ranks wait for a rank that waits for no rank
  mismatch,     ///< ranks called different operations, or with different sizes or types
  departed,     ///< a rank called another operation than in all rounds before
  cycle,        ///< ranks wait for each other
  undecided     ///< buffers have wrapped, and the first cause depends on operations that they have lost
};

/// The rounds in which a rank repeats its operations.
struct recorded_rounds {
  int period = 0;                ///< operations of a round; 0: the rank's operations do not repeat
  std::optional<int> departure;  ///< index of the first operation that differs from the round before
  std::optional<int> expected;   ///< index, in the round before, of the operation in place of `departure`, or of the next one
};

/// What the dumps tell of a hang.
struct hang_story {
  hang_cause cause = hang_cause::none;
  std::vector<int> culprits;  ///< ranks, ascending; empty unless `cause` is one of `absent_rank` to `cycle`
  std::vector<int> suspects;  ///< of `undecided`: ranks of which one is the first cause, ascending
  std::vector<recorded_wait> waits;
  std::vector<int> cycle;                ///< ranks that wait for each other, each for the next; empty: none
  std::optional<operation_place> at;     ///< the operation of another rank that waits for the culprit, or one that differs
  std::optional<operation_place> other;  ///< of a mismatch: the operation that `at` differs from
  std::string difference;                ///< of a mismatch: `operations`, `sizes` or `types`
  std::vector<int> followers;            ///< ranks that only wait for the culprits, directly or through others
  std::vector<int> further;              ///< ranks besides the culprits that waits lead to, and that wait for no rank
  std::vector<recorded_rounds> rounds;   ///< by rank
  std::int64_t waited = 0;               ///< ns, of the oldest wait
  std::int64_t longest_gap = 0;          ///< ns between two operations of a rank, while the job still went on
  std::vector<std::string> remarks;
};

/// Builds the wait-for graph of the dumps, and follows it to the first cause.
///
/// A collective waits for each member of its group without an operation of the same sequence number. The k-th send from a rank to
/// another in a group and the k-th receive are one message; where buffers have wrapped, `offsets_of` pairs them. Except with
/// Gloo, operations on one channel run in the order of the calls: a channel is a group's collectives, or a pair of ranks in a
/// group; where waits lead nowhere with a channel for each pair, one for the whole group.
/// \param dumps    as read
/// \param patience ns that operations may wait before ranks count as hung; negative: twice the longest gap between two operations
///                 of a rank, at least a second, at most the operation's own timeout
hang_story find_cause(recorder_dumps const& dumps, std::int64_t patience = -1);

}  // namespace plan_program
