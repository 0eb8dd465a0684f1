#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// \file
/// Dumps of PyTorch's flight recorder: the communication operations that each rank of a job called, in the order of the calls.

namespace plan_program {

/// The shapes and element types of an operation's tensors on one side.
struct recorded_tensors {
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<std::string> types;
  bool operator==(recorded_tensors const&) const = default;
  std::int64_t elements() const;
};

/// One operation that a rank called.
struct recorded_operation {
  std::string group;          ///< key of `recorder_dumps::groups`
  std::string backend;        ///< `nccl`, `gloo`; empty where the dump does not say
  std::string name;           ///< `all_reduce`, `send`, `recv`
  int peer = -1;              ///< global rank of a send's destination or a receive's source; -1: a collective
  std::int64_t sequence = 0;  ///< of the group's collectives, or of this rank's point-to-point operations in the group
  recorded_tensors inputs, outputs;
  bool completed = false;
  int batch = -1;            ///< operations that were posted together have the same number, which no other operation has
  std::int64_t created = 0;  ///< ns since 1970
  std::int64_t ended = 0;    ///< when its end was noticed, ns since 1970; 0: unknown
  std::int64_t timeout = 0;  ///< ns; 0: unknown
  std::string planned;       ///< the action of a schedule, `write_planned_actions`; empty: none
  std::string called_at;     ///< `train.py:123`, outside of PyTorch; empty: unknown

  bool is_send() const { return name == "send" && peer >= 0; }
  bool is_receive() const { return name == "recv" && peer >= 0; }
  bool is_collective() const { return peer < 0; }
  /// Whether operations of a channel run in the order of the calls. Gloo runs each as soon as its peers have called it.
  bool is_ordered() const { return backend != "gloo"; }
};

/// Numbers of elements, of which a message has equal ones on both sides; ranks may view one tensor in different shapes.
std::int64_t sent_elements(recorded_operation const& send);
std::int64_t received_elements(recorded_operation const& receive);
/// The element types of an operation's inputs or, without inputs, of its outputs.
std::vector<std::string> const& types_of(recorded_operation const& one);
/// Whether both sides have the same types, or one side's types are unknown.
bool same_types(recorded_operation const& a, recorded_operation const& b);

/// Members of a process group.
struct recorded_group {
  std::string name, description;
  std::vector<int> ranks;  ///< global ranks, by rank in the group
};

/// The dump of one rank.
struct rank_dump {
  std::string file, version;
  int rank = 0;
  std::vector<recorded_operation> operations;
  std::int64_t overwritten = 0;  ///< operations before the first one kept, whose places in the ring buffer were used again
  std::int64_t left_out = 0;     ///< operations between those kept; a dump of active operations alone leaves out complete ones
  std::int64_t newest = 0;       ///< the latest time in the dump, ns since 1970
  std::int64_t written = 0;      ///< when the file was written, or `newest` if that is later, ns since 1970
  bool is_whole() const { return overwritten == 0 && left_out == 0; }
};

/// The dumps of a job.
struct recorder_dumps {
  std::vector<std::optional<rank_dump>> by_rank;  ///< by global rank; absent: no file of this rank was found
  std::map<std::string, recorded_group> groups;
  std::vector<std::string> remarks;
  int world() const { return static_cast<int>(by_rank.size()); }
};

/// Reads every dump in a folder: pickles and JSON of PyTorch 2.5 and later. A file belongs to the rank whose number ends its name
/// (`nccl_trace_rank_3`, `rank-3.json`); files without a number at this place are passed over.
/// \param path a folder; one dump; or the beginning of the dumps' paths, such as `/tmp/nccl_trace_rank_`
/// \throws usage where the folder cannot be read or has no dump, a file is no dump or is compressed, or two files are of one rank
recorder_dumps read_recorder_dumps(std::string const& path);

}  // namespace plan_program
