#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <chevron/run/comm/agreement.hpp>

/// \file
/// What a command line says of a job that trains, whatever the model: schedule, ranks, steps, checkpoints.

namespace chevron::train {

enum class backend { threads, gloo, nccl, copies };

/// Each rank computes on a GPU.
inline bool is_on_gpus(backend b) { return b == backend::nccl || b == backend::copies; }
enum class precision { float32, bfloat16, autocast };

/// As the command line calls it.
char const* name_of(precision p);

struct job_options {
  std::string schedule = "1F1B";
  std::string schedule_text;  ///< of a schedule that comes from a file
  int ranks = 2;
  int chunks = 0;  ///< stages on a rank; 0: what the schedule's placement has, or 2 where that is open
  int micro_batches = 4;
  int slices = 1;         ///< of each sequence
  bool choose_slices = false;  ///< --slices auto: `choose_slices` has yet to say how many
  std::string slices_why;      ///< then: how many, and why, in words
  double attention = -1;  ///< share of causal attention, by which slices are cut; -1: as the model's operations say
  int replicas = 2;
  int shards = 1;                  ///< ranks that share each pipeline rank's stages
  bool sequence_parallel = false;  ///< between blocks shards hold pieces of the sequence
  bool print_groups = false;       ///< instead of training
  bool automatic = false;   ///< --schedule auto: planned from what the first steps cost
  std::string placement;    ///< then: linear, loop, vee or wave
  double memory_limit = 0;  ///< then: most activations on a rank, in microbatches of its whole share; 0: as many as 1F1B

  train::backend backend = train::backend::threads;
  bool backend_given = false;
  int nproc = 0;            ///< 0: not given
  bool share_gpus = false;  ///< more ranks than GPUs
  bool cuda_graph = false;  ///< computations are captured and launched as graphs
  double timeout = 300;

  int context = 64;  ///< tokens the model sees at once
  int micro_batch_size = 4;
  long steps = 300;
  std::uint64_t seed = 1;
  double learning_rate = 3e-3;           ///< highest
  std::optional<double> warm_up;         ///< steps in which the rate rises; nullopt: a twentieth of the steps
  std::optional<double> lowest_rate;     ///< of the last step; nullopt: a tenth of the highest
  std::string decay = "cosine";          ///< how the rate falls: cosine or linear
  std::vector<double> betas{0.9, 0.95};  ///< of AdamW: what its means of gradients and of their squares keep in a step
  double clip_grad_norm = 1;
  bool post_validation = false;
  bool shard = false;            ///< the optimizer, over replicas
  bool shard_gradients = false;  ///< gradients, too
  bool overlap_gather = false;   ///< of stepped parameters, with the next step
  bool recompute = false;
  train::precision precision = train::precision::float32;
  bool master_parameters = false;  ///< float32 masters of bfloat16 parameters

  std::string checkpoint;    ///< folder; empty: none is kept
  long save_every = 0;       ///< steps; 0: after the last one only
  int keep_checkpoints = 0;  ///< 0: all
  bool resume = false;
  double stop_after = 0;  ///< seconds; 0: no limit
  std::string metrics;
  std::string tensorboard;  ///< folder of event files; empty: none are written

  int world() const { return ranks * replicas * shards; }
  /// Of one replica in a step.
  int samples() const { return micro_batches * micro_batch_size; }
};

/// `0.9,0.95`
std::string words_for_betas(job_options const& o);

/// `--ranks 2 × --replicas 3`, and ` × --shards 2` where there are several.
std::string words_for_world(job_options const& o);

/// \param heads of attention, those of keys where they are fewer \param of_heads their number in words
/// \throws usage_error where shards cannot share the heads, or a sequence that is to be cut
void check_shards(job_options const& o, int heads, std::string const& of_heads);

/// ` × 2 shards`; empty where stages have one.
std::string words_for_shards(job_options const& o);

/// The global ranks of each pipeline, of the replicas of each stage, and of its shards, a line each.
std::string groups_of(job_options const& o);

/// What processes of a job must have been told alike, since the trainer does not see it.
void add_values(named_values& to, job_options const& o);

CLI::Validator whole(std::int64_t least, std::int64_t most);  ///< a whole number in a range, with the range in the error
CLI::Validator positive(bool zero_too);
CLI::Validator one_of(std::vector<std::string> words);

/// The flags for it, in groups, so that a program can put its own between them.
class job_flags {
 public:
  /// \param app must stay until `read` has been called
  job_flags(CLI::App& app, job_options& to);

  /// \param automatic whether `--schedule auto` is known
  void pipeline(bool automatic = false);
  void ranks();
  void training();
  void files();

  /// Parses the command line. Prints help and ends with 0 where that is asked for.
  /// \throws usage_error, with the remedy, for anything that cannot be used
  void read(int argc, char** argv);

 private:
  void read_automatic();

  CLI::App& app_;
  job_options& o_;
  std::string slices_name_ = "1", backend_name_ = "threads", precision_name_ = "float32", shard_name_;
  CLI::Option *ranks_ = nullptr, *chunks_ = nullptr, *micro_batches_ = nullptr, *slices_ = nullptr, *attention_ = nullptr,
              *backend_ = nullptr, *shard_ = nullptr, *sequence_parallel_ = nullptr;
  CLI::Option *placement_ = nullptr, *memory_limit_ = nullptr;  // null where `auto` is not known
};

}  // namespace chevron::train
