#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/tools/search/held_sets.hpp>
#include <chevron/tools/search/layer_bytes.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/search/sliced_layer_costs.hpp>
#include <chevron/tools/show/picture.hpp>

#include "model.hpp"

/// \file
/// Ways to divide a model over the machines of a cluster: their times, bytes and lower bounds, the search for the shortest, and
/// their outputs. docs/guides/cluster-plan.md describes the times, the bounds and the order of the search.

namespace plan_program {

/// The machines, and the sequences of a step.
struct cluster {
  int nodes = 1, gpus = 8;
  std::int64_t memory = 0;
  double inside = 0, between = 0;  ///< bytes a millisecond that one device sends, in each direction
  int cards = 0;  ///< network cards of a machine, each with the rate `between`, which its devices share; 0: one for each device
  double latency_inside = 0, latency_between = 0;  ///< milliseconds from a transfer's end to its arrival
  std::int64_t sequences = 0;                      ///< of a step

  int devices() const { return nodes * gpus; }
  int node_of(int global_rank) const { return global_rank / gpus; }
};

/// A schedule, how many chunks each rank has, and the facts about it from which bounds follow before a plan is made.
struct named_schedule {
  char const* name;
  int chunks;
  bool vee;             ///< the last stage is on rank 0, otherwise on the last rank
  bool whole_backward;  ///< backwards are not split: the last action of each rank is a B
  bool sliced = false;  ///< of sequences in slices
  /// Made for steps that overlap: without post-validation only ways of which the user names the schedule have it.
  bool overlapping = false;

  /// Whether any number of chunks from 2 on exists.
  bool takes_chunks() const { return std::string_view(name).ends_with("Interleaved1F1B"); }
};

/// One way to train on the cluster, with its times in milliseconds.
struct way {
  int ranks = 1, shards = 1, replicas = 1, samples = 1, micro_batches = 1;
  /// Ranks over which each layer's experts are divided, the shards of neighbouring replicas; 1: shards cut each expert.
  int expert_ranks = 1;
  int slices = 1;  ///< of each sequence
  named_schedule schedule{};
  bool recompute = false, sharded = false;
  bool post_validated = false;  ///< ranks begin the next step before they know the norm of the whole gradient
  double bound = 0;             ///< lower bound of `time`, for any numbers of layers
  std::vector<int> layers{};
  double time = 0;         ///< of a step
  double pipeline = 0;     ///< of this, from the first F to the last B or W; of steps that overlap, without what ends a step
  double bubble = 0;       ///< share of the pipeline's time in which ranks wait
  double sums = 0;         ///< by which sums over replicas and gathers make the step longer
  double optimizer = 0;    ///< of steps that overlap: by which the optimizer and its copies make the step longer
  double collectives = 0;  ///< over shards, on the fullest rank; a part of `pipeline`
  double routing = 0;      ///< all-to-all of experts, on the fullest rank; a part of `pipeline`
  double again = 0;        ///< of recomputation, a part of `pipeline`
  std::int64_t bytes = 0;  ///< of the fullest rank
  std::string limit{};     ///< the part that takes most, besides the model's own computations
  /// With slices: the share of attention by which slices take equal time (plan/slices.hpp), and the tokens at which they end.
  double attention = 0;
  std::vector<std::int64_t> slice_ends{};

  /// Neighbouring replicas that hold each expert once among them.
  int expert_replicas() const { return expert_ranks > shards ? expert_ranks / shards : 1; }
  /// Replicas over which an expert's gradients are summed.
  int expert_copies() const { return replicas / expert_replicas(); }
};

/// Bytes of one slice of a microbatch, or of a whole microbatch, on the shards of a way.
struct slice_sizes {
  chevron::search::layer_bytes bytes;
  double message = 0;  ///< bytes of a message between ranks
};

/// Costs of one microbatch on the shards of a way.
struct sharded_costs {
  chevron::search::sliced_layer_costs costs;
  std::vector<slice_sizes> slices;       ///< as many as those of `costs`
  chevron::search::layer_costs work;     ///< of the microbatch, over all its slices
  std::vector<std::int64_t> parameters;  ///< by piece
  std::vector<std::int64_t> of_experts;  ///< by piece: of the parameters, those of experts
  /// By piece, of the microbatch: sums over shards in F and in the backward; all-to-all of experts in F, as many in I.
  std::vector<double> collective, backward_collective, routing;
  std::int64_t copied = 0;               ///< bytes of each parameter that post-validation copies, as `copied_item`
  double attention = 0;                  ///< as `way::attention`
  std::vector<std::int64_t> slice_ends;  ///< as `way::slice_ends`
};

/// Ways with equal keys have equal costs.
struct costs_key {
  int shards = 1, samples = 1, expert_ranks = 1, slices = 1;
  int together = 1;  ///< ranks of a group of experts that at least lie in one machine
  int sending = 1;   ///< ranks of one machine that at most send to other machines in an all-to-all of experts

  auto operator<=>(costs_key const&) const = default;
};
costs_key costs_key_of(way const& of, cluster const& on);
sharded_costs costs_on(described_model model, cluster const& on, costs_key const& key);

/// A lawful plan, and the chunks that its ranks hold.
struct made_plan {
  chevron::plan plan;
  chevron::search::held_sets held;
};
/// \returns nothing where the schedule does not exist with the way's ranks and microbatches
std::optional<made_plan> plan_of(way const& of);

/// Times and bytes of a way: finds `layers` where they are empty, and sets all numbers but `bound`.
/// \param excess_seen set where the search for layers met numbers of layers that exceed the memory
/// \returns whether the model has enough layers
bool judge(way& of, described_model const& model, cluster const& on, sharded_costs const& given, made_plan const& made,
           bool& excess_seen);

/// Sets the times of a way whose `layers` are known. \returns its step as a picture: the pipeline, sums, optimizer and gathers
chevron::show::picture timeline_of(way& of, described_model const& model, cluster const& on, sharded_costs const& given,
                                   chevron::plan_view const& plan);

/// Milliseconds of a step that no numbers of layers of this way take less than.
double time_bound(way const& of, described_model const& model, cluster const& on, sharded_costs const& given);
/// Whether the layers do not fit into this memory, whatever the numbers of layers of the stages. \param made null: not made yet;
/// then parameters, gradients and the optimizer's state count alone
bool too_full(way const& of, std::int64_t memory, sharded_costs const& given, made_plan const* made);
/// Bytes that the fullest rank has at least.
std::int64_t byte_bound(way const& of, sharded_costs const& given, made_plan const& made);
/// Milliseconds that no way takes less than: all work of a step, the optimizer's included, divided evenly, without waits,
/// messages, sums and recomputation. Microbatches of any of these sizes count, in any of these numbers of slices.
double bound_of(described_model const& model, cluster const& on, std::vector<int> const& sizes, std::vector<int> const& slices);

/// Choices that the user makes. The space has the ways that agree with them.
struct fixed_choices {
  std::optional<int> ranks{}, shards{}, replicas{}, samples{};
  std::optional<int> slices{};  ///< 1: whole sequences
  std::optional<int> chunks{};  ///< interleaved schedules exist with any number from 2 on
  std::string schedule{};       ///< empty: any
  std::vector<int> layers{};    ///< of each stage, 1 or more between the first and the last; empty: as suits each schedule
  std::optional<bool> recompute{}, sharded{};
  std::optional<bool> post_validated = false;  ///< nothing: ways with it and without
};

/// The part of the space in which every way is judged. The ten shortest that fit always lie in it.
struct search_window {
  double times = 1;   ///< ways whose bound is up to so many times the time of the shortest
  double memory = 1;  ///< ways whose bound of bytes is up to so many times the memory
  bool all = false;   ///< every way
};

struct cluster_search {
  std::vector<way> best;     ///< the shortest that fit, at most ten
  std::vector<way> judged;   ///< all ways of the window, in the order of the space
  std::optional<way> least;  ///< if none fits: the one that needs least memory
  std::int64_t ways = 0;     ///< of the space
  std::int64_t longer = 0;   ///< ways whose bound is above the time of the tenth
};

/// Slices of all microbatches of a step, on one replica, at most.
inline constexpr std::int64_t most_units = 4096;
/// Names of the schedules of the space.
std::vector<std::string> searched_schedules();
/// Samples of a microbatch that divide a step.
std::vector<int> sample_sizes(cluster const& on, fixed_choices const& fixed);
/// Numbers of slices, for which sequences have enough tokens.
std::vector<int> slice_counts(described_model const& model, fixed_choices const& fixed);
/// Judges ways in the order of their bounds until the bound is above the tenth's time. The result does not depend on the number
/// of threads.
cluster_search search_ways(described_model const& model, cluster const& on, fixed_choices const& fixed,
                           search_window const& window, int threads);

/// The share of the devices' peak that the model's own operations reach in a step.
double utilization(way const& of, described_model const& model, cluster const& on);
/// The schedule's name, with the number of chunks where it is left open.
std::string schedule_words(way const& of);

/// Why chevron-finetune does not train models of this kind; empty: it does.
std::string not_run_by_finetune(described_model const& model);
/// The command that trains so under torchrun, for a folder that chevron-finetune reads.
std::string torchrun_command(way const& of, described_model const& model, cluster const& on);
/// A batch script for Slurm that trains so.
std::string slurm_script(way const& of, described_model const& model, cluster const& on);
/// The part of the plane that the picture shows: up to so many times the shortest time, and the memory.
inline constexpr double map_times = 1.3, map_memory = 1.3;
/// The judged ways as marks in a plane of memory and time, as SVG, or as a page.
std::string cluster_picture(cluster_search const& found, described_model const& model, cluster const& on, double bound,
                            bool page);

}  // namespace plan_program
