#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include <chevron/base/format.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/device_graph.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/joint_calls.hpp>
#include <chevron/run/stage/data_agreement.hpp>
#include <chevron/run/stage/own_work.hpp>
#include <chevron/run/stage/slice_cuts.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/loss_scale.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/step_report.hpp>

/// \file
/// The options of a trainer.

namespace chevron {

/// Argument of `before_optimizer_step`: the final gradients of a step, and figures of its report. This rank's gradients are in
/// `.grad()` of each parameter.
struct final_gradients {
  long step = 0;                                ///< from 0
  double loss = 0;                              ///< the report's loss
  double grad_norm = 0;                         ///< the report's norm, before clipping
  double learning_rate = 0;                     ///< the report's learning rate
  /// The parameters that this rank trains, in the order of stages and registration; masters in place of parameters that have
  /// one.
  std::span<named_parameter const> parameters;
};

/// The handling of a step whose loss or gradient is infinite or not a number.
enum class not_finite {
  stop,  ///< throw `numerical_error` on every rank; no parameter was changed
  skip   ///< leave parameters, optimizer and buffers as they were before the step, and continue
};

/// The options of a trainer. All ranks must give equal values, except for `device`, `overlap_pairs`, `graphs`,
/// `before_optimizer_step`, `element_wise_hook` and `on_report`.
struct trainer_options {
  double clip_grad_norm = 0;                                ///< largest global gradient norm; 0: no clipping
  not_finite when_not_finite = not_finite::stop;            ///< the handling of a loss or gradient that is not finite
  std::function<double(long step)> learning_rate = {};      ///< rate of a step, from 0; empty: the optimizer's own rates
  std::size_t bucket_bytes = std::size_t{25} << 20;         ///< gradients are summed over replicas in pieces of this size
  std::uint64_t seed = 0;                                   ///< seed of a step's random numbers: dropout … (random_scope.hpp)
  std::optional<at::ScalarType> autocast = {};              ///< dtype of autocast around stages and loss: at::kBFloat16 …
  std::optional<loss_scaling> scaling = {};                 ///< multiplies the loss before its backward: for half precision
  /// Whether replica 0's buffers (running means …) are copied to all replicas of a stage at the end of each step, like the
  /// option of this name in PyTorch's DistributedDataParallel; buffers of experts are copied from the first replica that holds
  /// the same experts. false: each replica has buffers of its own, and no checkpoint
  /// can be saved if buffers differ.
  bool broadcast_buffers = true;
  /// The training state that is divided over the replicas (ZeRO). Between threads, and between replicas on one machine, results
  /// have the same bits as with an unsharded optimizer. The groups of `optimizer()` then contain the pieces of parameters in
  /// this replica's share. With `post_validation` a step ends before this rank has received the shares of all replicas;
  /// `synchronize()` waits for the shares. For element-wise optimizers (those of torch::optim that checkpoints know, Chevron's
  /// fused ones, and those that `element_wise` declares) shares have equal size; for any other optimizer a share has whole
  /// parameters, balanced by size.
  ///
  /// `sharding::gradients` also frees a stage's gradients, except for this replica's share, from the sum over the replicas
  /// until the stage's next backward. Before a rank allocates a stage's gradients again, the rank waits for the sums of its
  /// other stages. The option saves memory if a rank has several stages whose backwards follow one another, but not with one
  /// stage per rank, since the peak comes before the sum. When `step` returns, `.grad()` is empty except for tied parameters.
  /// Not with `graphs`.
  sharding shard = sharding::nothing;
  /// With a sharded optimizer: `step` returns before this rank has received the shares of all replicas, and the next step waits
  /// for the parameters of a stage at the stage's first computation (UNSHARD), so that gathers overlap with computations of
  /// earlier stages. Before reading or changing parameters, the caller must call `synchronize()`; evaluators and checkpoints
  /// call it themselves. The next call of the trainer refuses a change without it.
  bool overlap_gather = false;
  /// Whether each trained half-precision parameter has a float32 master. The optimizer's factory receives the masters under the
  /// parameters' names; the optimizer steps a master with the unrounded float32 sum of the gradient; after each step the master
  /// is rounded into the parameter. With `shard` a replica has masters only for its share. Values that the caller writes into a
  /// parameter between two steps, in place and not through `.data()`, are copied to the master before the next step. Parameters
  /// of other dtypes have no master.
  bool master_parameters = false;
  loss_weight_function loss_weight = {};  ///< the weight of a microbatch in the mean loss (its tokens, say); empty: its samples
  /// Chooses where a plan with slices cuts sequences: `slices_by_cost`, or a function of the microbatch (which cuts between
  /// documents, say). Empty: slices of equal lengths; if lengths differ by one, longer slices come first.
  slice_cuts_function slice_cuts = {};
  /// Called on every rank before the optimizer steps, in every step that is not skipped. Gradients are already summed over
  /// replicas and tied parameters, unscaled, clipped, and in the parameters' own dtype; with `master_parameters` the function
  /// receives masters in place of half-precision parameters, with float32 gradients. The function may read gradients (to log
  /// norms by layer, say) and change them in place, equally on all replicas (whose random numbers are equal here); the report
  /// has the norm before the change. The function must not change parameters. Not with `post_validation`, where ranks step
  /// before gradients are known to be final, nor with `shard`, where no replica has all gradients.
  std::function<void(final_gradients const&)> before_optimizer_step = {};
  /// Whether `before_optimizer_step` may be given pieces of parameters that are cut over shards or experts: it treats each
  /// element by itself, or combines pieces (`named_parameter::is_piece`). false: a rank with pieces refuses the function.
  bool element_wise_hook = false;
  /// Whether a rank steps as soon as its own gradients are complete, and begins the next step. During the first forwards of the
  /// next step, ranks gather whether all gradients were finite and the norm within `clip_grad_norm`; if not, all ranks undo the
  /// step and repeat or skip it. Results are the same to the last bit, and a step takes the plan's span instead of its
  /// makespan. Needs memory for a copy of parameters and optimizer state. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241,
  /// section 4.)
  bool post_validation = false;
  /// Runs the schedule's own actions, X, Y and Z (describe/own_action.hpp), each on the rank of its stage. Ranks run actions at
  /// the same time, so the function must guard data that ranks share.
  own_handler own_actions = {};
  /// Called on every rank once per step, in the order of steps, when all numbers of the step's report are known: at the end of
  /// `step`, or with `post_validation` at the end of the next `step`, in an evaluation, a checkpoint or `synchronize`.
  std::function<void(step_report const&)> on_report = {};
  /// The device on which this rank computes: its stages' parameters must be there, and batches are copied there. Ranks of one
  /// process may share a device.
  at::Device device = at::kCPU;
  /// Whether the two halves of a fused pair (DualPipeV) run at the same time on the CPU, in two threads, which is faster if a
  /// rank has two cores. On an accelerator the halves always run at the same time, on two streams; with several shards, or
  /// experts over several replicas, never.
  bool overlap_pairs = false;
  /// Captures the computations that repeat from step to step as graphs, and launches each graph as a whole: `cuda_graphs()` of
  /// cuda_graph.hpp on a GPU. Branches that a stage takes on the host are then fixed at the capture. Empty: kernels are
  /// launched one by one.
  std::shared_ptr<graph_maker> graphs = {};
  /// With `post_validation`: the number of steps in a row without clipping or skipping after which ranks step before the
  /// verdict. Until then ranks wait, since repeating a step costs more than the wait.
  int stable_steps = 10;
  /// The steps in which the ranks of a pipeline compare fingerprints of their batches: if each rank shuffled samples by itself,
  /// inputs (from the first stage's rank) would not match targets (from the last stage's rank). Reading all values takes about
  /// 230 µs a MiB (one core of an Intel Xeon); a sample about 0.5 µs for each tensor of each microbatch.
  data_check check_data = data_check::sampled;
  /// The handling of two replicas that were given the same batch in the first step that compares data, by a sampler that
  /// ignores the replica's number, say. Evaluators do not compare replicas.
  same_batch when_same_batch = same_batch::warn;
  /// The number of steps from one comparison of copies to the next: copies of parameters and optimizer state, on all replicas
  /// and shards of a stage and of tied parameters, must be equal. Copies are also compared before a checkpoint or weights are
  /// saved. 0: no comparison at all, except for the copies' optimizer options, which are compared in every step. A comparison
  /// reads all bytes of the copies once. In these steps ranks also check that trained parameters are finite, and that modules
  /// have the parameters that they had when the trainer was made.
  int check_copies = 100;
};

namespace detail {

inline std::string scaling_in_words(loss_scaling const& s) {
  return "from " + number_text(s.initial) + " between " + number_text(s.least) + " and " + number_text(s.most) + ", times " +
         number_text(s.growth) + " after " + std::to_string(s.growth_interval) + " steps, times " + number_text(s.backoff) +
         " on overflow";
}

/// Checks the options. \throws usage_error for a value out of range, and for options that exclude each other
inline void check(trainer_options const& options, topology const& where) {
  joint_calls const together(where);
  auto const refuse_if = [](bool wrong, std::string const& why) {
    if (wrong) throw usage_error(why);
  };
  refuse_if(where.expert_replicas > 1 && options.shard != sharding::nothing,
            "a sharded optimizer does not go with experts over " + std::to_string(where.expert_replicas) +
                " replicas, whose parameters have no copy on each replica. Remedy: experts within one replica, or "
                "sharding::nothing");
  refuse_if(together.any() && options.graphs != nullptr,
            "graphs do not go with " + together.words() +
                ", whose collectives are called in the order of the host. Remedy: no graphs");
  at::ScalarType const half = options.autocast.value_or(at::kFloat);
  refuse_if(half != at::kBFloat16 && half != at::kHalf && half != at::kFloat,
            std::string("autocast is ") + c10::toString(half) + ": give at::kBFloat16 or at::kHalf, or leave it out");
  refuse_if(!(options.clip_grad_norm >= 0),
            "clip_grad_norm is " + number_text(options.clip_grad_norm) + ": give the largest norm, or 0 for no clipping");
  refuse_if(options.stable_steps < 0,
            "stable_steps is " + std::to_string(options.stable_steps) + ": give a number of steps from 0");
  refuse_if(options.check_copies < 0,
            "check_copies is " + std::to_string(options.check_copies) + ": give a number of steps from 0");
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

/// Adds the options that must be equal on all ranks to the values that ranks compare.
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
  out.add("microbatches count", options.loss_weight ? "the caller's weights" : "their samples");
  if (options.slice_cuts) out.add("slices", "cut by the caller");
  out.add("data compared", options.check_data == data_check::never        ? "never"
                           : options.check_data == data_check::every_step ? "in every step"
                           : options.check_data == data_check::sampled    ? "by samples"
                                                                          : "in the first step");
  out.add("replicas with the same batch", options.when_same_batch == same_batch::warn   ? "told"
                                          : options.when_same_batch == same_batch::stop ? "refused"
                                                                                        : "allowed");
  out.add("copies compared", options.check_copies == 0 ? "never" : "every " + std::to_string(options.check_copies) + " steps");
  out.add("post-validation", options.post_validation ? "after " + std::to_string(options.stable_steps) + " stable steps" : "no");
}

}  // namespace detail

}  // namespace chevron
