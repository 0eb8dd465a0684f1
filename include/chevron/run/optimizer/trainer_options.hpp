#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include <chevron/run/comm/consistency.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/number_text.hpp>
#include <chevron/run/data/data_agreement.hpp>
#include <chevron/run/data/slice_cuts.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/execution/executor_settings.hpp>
#include <chevron/run/model/own_work.hpp>
#include <chevron/run/optimizer/loss_scale.hpp>
#include <chevron/run/optimizer/optimizer_factory.hpp>
#include <chevron/run/optimizer/step_report.hpp>

/// \file
/// The options of a trainer.

namespace chevron {

/// Argument of `before_optimizer_step`: a step's final gradients and figures. The gradients are this rank's, in `.grad()` of each
/// parameter.
struct final_gradients {
  long step = 0;                                ///< from 0
  double loss = 0;                              ///< as in the step's report, and so the next two
  double grad_norm = 0;                         ///< before clipping
  double learning_rate = 0;                     ///< of this step
  /// All that this rank trains, in the order of stages and registration; of a parameter that has a master, the master.
  std::span<named_parameter const> parameters;
};

/// The handling of a step whose loss or gradient is infinite or not a number.
enum class not_finite {
  stop,  ///< throw `numerical_error` on every rank; no parameter was changed
  skip   ///< leave parameters and optimizer as they are and go on
};

/// The options of a trainer. All ranks give the same values, except for `device`, `overlap_pairs`, `graphs`, `deferred_weights`,
/// `before_optimizer_step` and `on_report`.
struct trainer_options {
  double clip_grad_norm = 0;                                ///< largest global gradient norm; 0: no clipping
  not_finite when_not_finite = not_finite::stop;            ///< the handling of a loss or gradient that is not finite
  std::function<double(long step)> learning_rate = {};      ///< by step, from 0; empty: the optimizer's own rates
  std::size_t bucket_bytes = std::size_t{25} << 20;         ///< gradients are summed over replicas in pieces of this size
  std::uint64_t seed = 0;                                   ///< of a step's random numbers: dropout … (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};              ///< dtype of autocast around stages and loss, as at::kBFloat16
  std::optional<loss_scaling> scaling = {};                 ///< multiplies the loss before its backward: for half precision
  /// At the end of each step all replicas of a stage get the buffers (running means …) of replica 0, as with the option of this
  /// name of PyTorch's DistributedDataParallel. false: each replica keeps its own buffers, and a checkpoint is refused where
  /// buffers differ.
  bool broadcast_buffers = true;
  /// The state that is cut over the replicas. On threads, and on replicas of one machine, every bit of the results is that of an
  /// unsharded optimizer. The groups of `optimizer()` then hold the pieces of parameters in this replica's share; with
  /// `post_validation` a step ends before this rank has the shares of all replicas, and `synchronize()` waits for them.
  /// Element-wise optimizers (those of torch::optim that checkpoints know, and Chevron's fused ones) get shares of equal size,
  /// all other optimizers whole parameters, balanced by size.
  ///
  /// `sharding::gradients` also frees a stage's gradients, but this replica's share, between their sum over the replicas and the
  /// stage's next backward. The rank waits for sums of its other stages before a stage's gradients are made anew. Memory is saved
  /// where a rank has several stages whose backwards follow one another; with one stage a rank none, as the peak comes before the
  /// sum. `.grad()` is then empty when `step` returns, but of tied parameters. Not with `graphs`.
  sharding shard = sharding::nothing;
  /// With a sharded optimizer: `step` returns before this rank has the shares of all replicas, and the next step waits for the
  /// parameters of a stage at the stage's first computation (UNSHARD), so that gathers hide behind the computations of stages
  /// before. To be followed by `synchronize()` before the caller reads parameters; evaluators and checkpoints call it themselves.
  bool overlap_gather = false;
  /// Whether each half-precision parameter that is trained has a float32 master: the optimizer's factory gets the masters under
  /// the parameters' names, the optimizer steps a master with the gradient's float32 sum, unrounded, and the master is rounded
  /// into the parameter after each step. With `shard` a replica has masters of its share alone. What the caller writes into a
  /// parameter between two steps, in place and not through `.data()`, goes into its master before the next step. Parameters of
  /// other dtypes are stepped as without.
  bool master_parameters = false;
  loss_weight_function loss_weight = {};  ///< the weight of a microbatch in the mean loss (its tokens, say); empty: its samples
  /// Where sequences are cut, of a plan with slices: `slices_by_cost`, or a function of the microbatch, by the borders of its
  /// documents, say. Empty: slices of equal lengths, the longer ones first.
  slice_cuts_function slice_cuts = {};
  /// Called on every rank, in every step that is not skipped, between the gradients and the optimizer. Gradients are summed over
  /// replicas and tied parameters, unscaled and clipped, and in the parameters' own dtype; with `master_parameters` the function
  /// gets masters in place of half-precision parameters, with float32 gradients. The function may read gradients (to
  /// log norms by layer, say) and change them in place, on all replicas alike (replicas draw equal random numbers here); the
  /// reported norm is that before the change. The function must leave parameters alone. Not with `post_validation`, where ranks
  /// step before gradients are known to be final, nor with `shard`, where no replica has all gradients.
  std::function<void(final_gradients const&)> before_optimizer_step = {};
  /// Steps as soon as this rank's own gradients are complete, and goes on with the next step; during the first forwards of that
  /// step all ranks learn whether the whole gradient was finite and within `clip_grad_norm`, and do the step over if not. Results
  /// are the same to the last bit, and a step takes the plan's span instead of its makespan. Needs memory for a copy of
  /// parameters and optimizer state. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4.)
  bool post_validation = false;
  /// Runs the schedule's own actions, X, Y and Z (describe/own_action.hpp), each on the rank of its stage. Ranks run actions at
  /// the same time, so the function guards all that it shares between ranks.
  own_handler own_actions = {};
  /// Called on every rank once for each step, in the order of steps, when all numbers of its report are known: at the end of
  /// `step`, or with `post_validation` at the end of the next `step`, in an evaluation, a checkpoint or `synchronize`.
  std::function<void(step_report const&)> on_report = {};
  /// The device of this rank's stages, which their parameters must be on; batches are copied to the device. Ranks of one process
  /// may share a device.
  at::Device device = at::kCPU;
  /// Whether the two halves of a fused pair (DualPipeV) run beside each other on the CPU, in two threads, which pays where a rank
  /// has two cores. On an accelerator halves always do, on two streams; with several shards never.
  bool overlap_pairs = false;
  /// Captures the computations of steps that repeat themselves, and launches each as a whole: `cuda_graphs()` of cuda_graph.hpp
  /// on a GPU. A stage's decisions on the host are then taken once, at the capture. Empty: kernels are launched one by one.
  std::shared_ptr<graph_maker> graphs = {};
  /// The largest number of weight gradients (W) that a rank holds back until it would wait for a message, so that W's fill waits
  /// that the plan did not foresee, of stages whose times vary. Every bit of every gradient stays the same, and limits that the
  /// plan declares are kept; without a limit, as many microbatches more may be kept for W at a time. With 0, and in schedules
  /// without W, the order is the plan's. On an accelerator a W goes behind a message that has come when the host asks for its
  /// computation. Not with `graphs`, whose order is that of their capture, nor with several shards.
  int deferred_weights = 0;
  /// With `post_validation`: steps in a row without clipping or skipping before ranks step without waiting, as doing a step over
  /// costs more than the wait.
  int stable_steps = 10;
  /// The steps in which the ranks of a pipeline compare fingerprints of their batches: where each rank shuffles for itself,
  /// inputs (of the first stage's rank) and targets (of the last stage's) do not belong together. All remaining steps cost
  /// nothing.
  data_check check_data = data_check::first_step;
  /// Whether messages between stages carry a checksum, so that a bit that changes on the way, in memory or a network, is a
  /// `corrupt_message_error` and no wrong number. Each message is read twice more. On the CPU only: an accelerator's host does
  /// not see messages.
  bool check_messages = false;
  /// Steps from one comparison of copies that must stay equal to the next: of parameters and optimizer state, on all replicas of
  /// a stage, on its shards, and of tied parameters. 0: never. Copies are also compared before a checkpoint or weights are saved,
  /// and the options that copies are stepped with in every step. A comparison reads all bytes of the copies once.
  int check_copies = 100;
};

namespace detail {

inline std::string scaling_in_words(loss_scaling const& s) {
  return "from " + number_text(s.initial) + " between " + number_text(s.least) + " and " + number_text(s.most) + ", times " +
         number_text(s.growth) + " after " + std::to_string(s.growth_interval) + " steps, times " + number_text(s.backoff) +
         " on overflow";
}

/// \throws usage_error for a value out of range, and for options that do not go together
inline void check(trainer_options const& options, topology const& where) {
  int const shards = where.shards;
  auto const refuse_if = [](bool wrong, std::string const& why) {
    if (wrong) throw usage_error(why);
  };
  refuse_if(where.expert_replicas > 1 && options.shard != sharding::nothing,
            "a sharded optimizer does not go with experts over " + std::to_string(where.expert_replicas) +
                " replicas, whose parameters have no copy on each replica. Remedy: experts within one replica, or "
                "sharding::nothing");
  refuse_if(shards > 1 && options.deferred_weights > 0,
            "deferred_weights is " + std::to_string(options.deferred_weights) + " with " + std::to_string(shards) +
                " shards, which would call collectives in different orders: each rank defers by its own messages. "
                "Remedy: 0");
  refuse_if(shards > 1 && options.graphs != nullptr,
            "graphs do not go with shards, whose collectives are called in the order of the host. Remedy: no graphs");
  refuse_if(!(options.clip_grad_norm >= 0),
            "clip_grad_norm is " + number_text(options.clip_grad_norm) + ": give the largest norm, or 0 for no clipping");
  refuse_if(options.stable_steps < 0,
            "stable_steps is " + std::to_string(options.stable_steps) + ": give a number of steps from 0");
  refuse_if(options.deferred_weights < 0,
            "deferred_weights is " + std::to_string(options.deferred_weights) + ": give a number of W's from 0");
  refuse_if(options.check_copies < 0,
            "check_copies is " + std::to_string(options.check_copies) + ": give a number of steps from 0");
  refuse_if(options.deferred_weights > 0 && options.graphs != nullptr,
            "deferred_weights is " + std::to_string(options.deferred_weights) +
                " with graphs, which are launched in the order of their capture. Remedy: 0, or no graphs");
  refuse_if(options.check_messages && (options.device != at::kCPU || options.graphs),
            "check_messages does not go with " + (options.graphs ? std::string("graphs") : options.device.str()) +
                ", where the host does not see messages and so cannot compare them. Remedy: leave it out");
  refuse_if(
      options.post_validation && options.before_optimizer_step,
      "before_optimizer_step does not go with post_validation, which steps before gradients are known to be final, and may do "
      "a step over: leave either out");
  refuse_if(options.overlap_gather && options.shard == sharding::nothing,
            "overlap_gather without a sharded optimizer, which alone gathers parameters. Remedy: shard = sharding::optimizer, or "
            "leave overlap_gather out");
  refuse_if(options.shard != sharding::nothing && options.before_optimizer_step,
            "before_optimizer_step does not go with a sharded optimizer: no replica has all gradients. Remedy: shard = "
            "sharding::nothing, or leave before_optimizer_step out");
  refuse_if(
      options.shard == sharding::gradients && options.graphs != nullptr,
      "shard = sharding::gradients does not go with graphs: a graph adds gradients where their buffer was at its capture, and "
      "this buffer is made anew in each step. Remedy: sharding::optimizer, or no graphs");
  if (options.scaling) loss_scale const acceptable(*options.scaling);
}

/// Adds the options that must be equal on all ranks.
inline void add(named_values& out, trainer_options const& options) {
  out.add("clip gradient norm", number_text(options.clip_grad_norm));
  out.add("when not finite", options.when_not_finite == not_finite::stop ? "stop" : "skip");
  out.add("learning rate", options.learning_rate ? "scheduled" : "fixed");
  out.add("bucket bytes", std::to_string(options.bucket_bytes));
  out.add("seed", std::to_string(options.seed));
  out.add("autocast", options.autocast ? c10::toString(*options.autocast) : "no");
  out.add("loss scaling", options.scaling ? scaling_in_words(*options.scaling) : "no");
  out.add("over replicas sharded", words_of(options.shard));
  if (options.overlap_gather) out.add("parameters gathered", "in the next step");
  out.add("half-precision parameters", options.master_parameters ? "with float32 masters" : "without masters");
  out.add("buffers over replicas", options.broadcast_buffers ? "of replica 0" : "of each");
  out.add("microbatches count", options.loss_weight ? "what the caller weighs" : "their samples");
  if (options.slice_cuts) out.add("slices", "cut by the caller");
  out.add("data compared", options.check_data == data_check::never        ? "never"
                           : options.check_data == data_check::every_step ? "in every step"
                                                                          : "in the first step");
  out.add("messages", options.check_messages ? "with checksums" : "as they are");
  out.add("copies compared", options.check_copies == 0 ? "never" : "every " + std::to_string(options.check_copies) + " steps");
  out.add("post-validation", options.post_validation ? "after " + std::to_string(options.stable_steps) + " stable steps" : "no");
}

}  // namespace detail

}  // namespace chevron
