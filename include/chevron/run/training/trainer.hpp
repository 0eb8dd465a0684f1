#pragma once
// long: the public class: steps, accumulation and post-validation share one state

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/data_agreement.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/execution/executor.hpp>
#include <chevron/run/model/buffer_snapshot.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/global_step.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>
#include <chevron/run/optimizer/tied_parameters.hpp>
#include <chevron/run/training/build_stages.hpp>
#include <chevron/run/training/preflight.hpp>
#include <chevron/run/training/replica_buffers.hpp>
#include <chevron/run/training/trainer_options.hpp>
#include <chevron/run/training/trainer_setup.hpp>

/// \file
/// Training: what a user touches.

namespace chevron {

struct checkpoint_session;

/// One rank's trainer. The same code drives threads and processes: build it on every rank with the same program, loss, optimizer
/// and options, then call `step` on every rank alike.
///
///     chevron::trainer trainer({.program = program,
///                               .transport = comm,
///                               .stages = build_stage,
///                               .loss = loss,
///                               .optimizer = chevron::optimizer<torch::optim::AdamW>(3e-4)});
///     auto const report = trainer.step(tokens, next_tokens);
///
/// All ranks of a pipeline take the same batch (each uses what its stages need), replicas take different ones: see sampler.hpp.
/// Ranks compare their batches in the first step (`trainer_options::check_data`). Errors are the typed ones of error.hpp; after
/// one that is no `usage_error` of the call's arguments the trainer is of no further use.
class trainer {
 public:
  /// Collective: compares program, options, parameters and buffers over the ranks.
  /// \throws preflight_error where ranks differ; usage_error for a stage that cannot be trained so
  explicit trainer(trainer_setup setup)
      : program_(std::move(setup.program)),
        comm_(&setup.transport),
        loss_(std::move(setup.loss)),
        post_validation_(setup.options.post_validation),
        streams_(std::make_shared<compute_streams>(setup.options.device,
                                                   setup.options.overlap_pairs || !setup.options.device.is_cpu())),
        reduction_(setup.options.reduction),
        loss_weight_(setup.options.loss_weight) {
    transport& comm = *comm_;
    trainer_options const& options = setup.options;
    collective_scope const doing(comm, "making the trainer");
    program_view const p = program_.view();
    compute_streams::scope const here(*streams_);
    check_layout(p);
    if (p.plan.forward_only)
      throw usage_error("this program only runs forward: train with a plan that has backwards, evaluate with this one");
    if (!loss_) throw usage_error("a trainer needs a loss function");
    detail::check(options);
    stages_ = detail::build_stages(p, setup.stages, comm, streams_->where(), options.broadcast_buffers);
    check_consistency(comm, lines(p, options));

    gradients_.resize(stages_.size());
    std::vector<gradient_buckets*> views(stages_.size(), nullptr);
    std::vector<std::string> taken;
    int buckets = 0;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (!stages_[s]) continue;
      for (std::string& name : stages_[s].side_input_names()) taken.push_back(std::move(name));
      gradients_[s] = std::make_unique<gradient_buckets>(stages_[s], buckets, options.bucket_bytes);
      buckets += gradients_[s]->buckets();
      views[s] = gradients_[s].get();
    }
    buffers_before_ = buffer_snapshot(stages_);
    if (options.broadcast_buffers) buffers_of_all_ = replica_buffers(stages_, comm.topology(), streams_->where(), buckets);
    tied_ = tied_parameters(p.plan, comm, views);
    update_ = std::make_unique<global_step>(
        p.plan, comm, std::move(views), taken, [this] { tied_.sum(*comm_, executor_->slots()); }, setup.optimizer,
        update_options{options.clip_grad_norm, options.when_not_finite, options.learning_rate, options.post_validation,
                       options.stable_steps, options.scaling, options.reduction, options.check_data,
                       options.before_optimizer_step});
    data_ = update_->data();
    weighted_losses_.resize(static_cast<std::size_t>(p.plan.size.micro_batches));
    executor_hooks hooks;
    hooks.reduce_gradients = [this](int s) {
      if (last_pass_) gradients_[static_cast<std::size_t>(s)]->start_all_reduce(*comm_);
    };
    hooks.optimizer_step = [this] { finish_batch(); };
    bool const shared = std::any_of(gradients_.begin(), gradients_.end(), [](auto const& g) { return g && g->shares(); });
    if (shared) hooks.before_gradients = [this](int s) { gradients_[static_cast<std::size_t>(s)]->attach(); };
    hooks.seed = options.seed;
    hooks.autocast = autocast_ = options.autocast;
    hooks.streams = streams_;
    hooks.graphs = options.graphs;
    hooks.before_capture = [this] {
      for (auto const& g : gradients_) {
        if (g) g->attach_all();
      }
    };
    executor_ = std::make_unique<executor>(program_, comm, stages_, loss_, std::move(hooks));
  }

  trainer(trainer const&) = delete;
  trainer& operator=(trainer const&) = delete;

  /// One optimizer step over a batch of this replica, cut into the program's microbatches along dimension 0.
  /// \param global_weight denominator of the mean loss: the sum of loss weights (samples, if the options have no `loss_weight`)
  /// over all microbatches, accumulated ones included, and all replicas; with `gradient_reduction::sum` of this replica only. 0:
  /// this replica's sum times the replicas \returns its report; with `post_validation` that of the step before, since this one's
  /// is not known yet
  step_report step(batch const& whole, double global_weight = 0) {
    std::int64_t const begin = now_ns();
    compute_streams::scope const here(*streams_);
    cut(whole);
    return step_of_batch(begin, global_weight);
  }
  /// The same over microbatches that the caller has cut, as many as the program runs; each may have sizes of its own.
  step_report step(std::vector<batch> const& micro_batches, double global_weight = 0) {
    std::int64_t const begin = now_ns();
    compute_streams::scope const here(*streams_);
    cut(micro_batches);
    return step_of_batch(begin, global_weight);
  }
  /// The same without side inputs.
  step_report step(tensors const& inputs, tensors const& targets, double global_weight = 0) {
    return step(batch{inputs, targets}, global_weight);
  }
  /// The same of one input and one target.
  step_report step(at::Tensor const& input, at::Tensor const& target, double global_weight = 0) {
    return step(batch{{input}, {target}}, global_weight);
  }

  /// Computes gradients and adds them to those of the next `step`, which must be given the same `global_weight`: a batch too
  /// large for one run of the program is trained on by some calls of `accumulate` and then one of `step`.
  void accumulate(batch const& whole, double global_weight) {
    compute_streams::scope const here(*streams_);
    cut(whole);
    accumulate_batch(global_weight);
  }
  void accumulate(std::vector<batch> const& micro_batches, double global_weight) {
    compute_streams::scope const here(*streams_);
    cut(micro_batches);
    accumulate_batch(global_weight);
  }
  void accumulate(tensors const& inputs, tensors const& targets, double global_weight) {
    accumulate(batch{inputs, targets}, global_weight);
  }

  /// With `post_validation`: waits until the last step stands. To be called before parameters or the optimizer are looked at, and
  /// at the end; evaluation does so itself. Collective.
  /// \returns the report of the last step
  step_report synchronize() {
    if (update_->pending()) {
      compute_streams::scope const here(*streams_);
      bool stands = true;
      fill_in(update_->verdict(stands));
    }
    return report_;
  }

  /// The stages by number; those of other ranks are empty.
  std::vector<stage>& stages() { return stages_; }
  /// This rank's optimizer; null if its stages have nothing to train.
  torch::optim::Optimizer* optimizer() { return update_->optimizer(); }
  transport& comm() { return *comm_; }
  program_view program() const { return program_.view(); }
  loss_function const& loss() const { return loss_; }
  std::optional<at::ScalarType> autocast() const { return autocast_; }
  /// The factor of loss scaling: part of what a checkpoint keeps.
  loss_scale& scaling() { return update_->scaling(); }
  /// What this rank did in its last step, and when.
  rank_trace const& last_record() const { return executor_->last_record(); }
  /// Seconds that this rank waited for the replicas' sums after the last gradients of its last step: what computation did not
  /// hide.
  double last_sum_wait() const { return update_->sum_wait(); }

  /// Why computations of the last step were not launched as graphs, in words; empty where they were.
  std::string graph_fallback_reason() const { return executor_->graph_fallback_reason(); }

  /// The number of the next step: also to be set when training goes on from a checkpoint.
  long next_step() const { return step_; }
  void next_step(long step) { step_ = step; }

  /// Are there gradients that wait for their `step`?
  bool accumulating() const { return passes_ > 0; }

  /// What the ranks of a pipeline use in common of a batch, nothing compared yet.
  detail::data_agreement const& data() const { return update_->data(); }
  /// What checkpoint.hpp knows of this trainer's checkpoints; null before the first.
  std::shared_ptr<checkpoint_session>& checkpoints() { return checkpoints_; }

  /// What this rank computes on.
  std::shared_ptr<compute_streams> const& streams() const { return streams_; }

  /// A batch with what this rank needs of it on its device. From pinned memory it is copied in the background: leave it alone
  /// until the step is over.
  batch on_device(batch const& whole) const {
    if (!streams_->on_accelerator()) return whole;
    auto const brought = [&](at::Tensor const& t) { return t.defined() ? t.to(streams_->where(), /*non_blocking=*/true) : t; };
    batch out = whole;
    if (stages_.front()) std::transform(out.inputs.begin(), out.inputs.end(), out.inputs.begin(), brought);
    if (stages_.back()) std::transform(out.targets.begin(), out.targets.end(), out.targets.begin(), brought);
    for (side_input& e : out.side_inputs) e.value = brought(e.value);
    return out;
  }
  std::vector<batch> on_device(std::vector<batch> const& micro_batches) const {
    if (!streams_->on_accelerator()) return micro_batches;
    std::vector<batch> out;
    for (batch const& one : micro_batches) out.push_back(on_device(one));
    return out;
  }

  /// Gives each microbatch its share of the loss.
  /// \param global_weight what microbatches count over all replicas; 0: every replica has as much as this one
  double weigh(split_batch& cut, double global_weight) const {
    if (loss_weight_) cut.weigh(loss_weight_);
    if (!(global_weight > 0))
      global_weight = cut.counts() * (reduction_ == gradient_reduction::mean ? comm_->topology().replicas : 1);
    if (!(global_weight > 0)) throw usage_error("the microbatches of this step count nothing: there is no mean loss");
    cut.share(global_weight);
    return global_weight;
  }

  /// Tells the transport whose slots come next, and that messages may have new shapes, when either changed.
  void take_turn(executor& next, split_batch const& cut) {
    comm_->check_usable();
    shapes_.clear();
    cut.append_shapes(shapes_);
    if (turn_ != &next || shapes_ != shapes_of_turn_) next.open(tied_.slots());
    turn_ = &next;
    std::swap(shapes_, shapes_of_turn_);
  }

 private:
  void cut(batch const& whole) {
    check_detached(whole);
    batch_.split(on_device(whole), program_.view().plan.size.micro_batches);
  }
  void cut(std::vector<batch> const& micro_batches) {
    for (batch const& one : micro_batches) check_detached(one);
    batch_.take(on_device(micro_batches), program_.view().plan.size.micro_batches);
  }

  void check_layout(program_view const& p) const {
    if (p.plan.size.ranks != comm_->topology().pipeline_ranks) {
      throw usage_error("the program is for " + std::to_string(p.plan.size.ranks) + " pipeline ranks, there are " +
                        std::to_string(comm_->topology().pipeline_ranks));
    }
  }

  named_values lines(program_view const& p, trainer_options const& options) const {
    named_values out = common_values(*comm_);
    add_program(out, p);
    detail::add(out, options);
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s]) add_stage(out, static_cast<int>(s), stages_[s], comm_->topology().replicas > 1, options.broadcast_buffers);
    }
    return out;
  }

  step_report step_of_batch(std::int64_t begin, double global_weight) {
    if (passes_ > 0 && global_weight != global_weight_) refuse_other_total(global_weight);
    global_weight_ = weigh(batch_, global_weight);
    run_batch(true);

    step_report const before = std::exchange(report_, {});
    report_.step = step_++;
    report_.seconds = static_cast<double>(now_ns() - begin + accumulating_ns_) * 1e-9;
    report_.peak_in_flight = peak_in_flight_;
    report_.used_graphs = launched_;
    report_.memory = memory_;
    if (result_) fill_in(*result_);
    passes_ = 0;
    accumulating_ns_ = 0;
    return post_validation_ ? before : report_;
  }

  void accumulate_batch(double global_weight) {
    std::int64_t const begin = now_ns();
    if (!(global_weight > 0))
      throw usage_error(
          "accumulate() needs to know what the whole step counts over all replicas: so many samples, if nothing else is weighed");
    if (passes_ > 0 && global_weight != global_weight_) refuse_other_total(global_weight);
    global_weight_ = weigh(batch_, global_weight);
    run_batch(false);
    ++passes_;
    accumulating_ns_ += now_ns() - begin;
  }

  [[noreturn]] void refuse_other_total(double global_weight) const {
    throw usage_error("the batches of one step were weighed as shares of " + detail::plain(global_weight_) + " and of " +
                      detail::plain(global_weight) + ": give accumulate() and step() the same total");
  }

  /// Runs the program once; the last time in a step with sums over the replicas and the optimizer.
  void run_batch(bool last) {
    last_pass_ = last;
    batch_.number_from(passes_ * batch_.count());
    take_turn(*executor_, batch_);
    if (passes_ == 0) {
      for (std::size_t s = 0; s < gradients_.size(); ++s) {
        if (gradients_[s]) gradients_[s]->check_frozen(static_cast<int>(s));
      }
      std::fill(weighted_losses_.begin(), weighted_losses_.end(), 0.0);
      input_ = {};
      peak_in_flight_ = 0;
      launched_ = true;
      memory_ = {};
      data_.begin();
    }
    data_.add(batch_);
    if (update_->pending()) {
      buffers_before_.take();
      executor_->run(batch_, step_, [this] { return last_step_stands(); });
    } else {
      if (passes_ == 0) zero_gradients();
      batch_.scale_gradients(update_->loss_factor());
      executor_->run(batch_, step_);
    }
    peak_in_flight_ = std::max(peak_in_flight_, executor_->last_record().peak_in_flight());
    launched_ = launched_ && executor_->launched();
    memory_.add(executor_->last_record().memory());
  }

  /// All gradients of one run of the program are there, or asked for.
  void finish_batch() {
    input_.counts += batch_.counts();
    input_.samples += batch_.samples();
    if (!last_pass_) return read_batch();
    input_.weighted_losses = weighted_losses_;
    input_.all_counts = global_weight_;
    input_.data = data_.numbers();
    buffers_of_all_.start(*comm_);
    result_ = update_->run(step_, input_, [this] { read_batch(); });
    data_.was_compared();
    buffers_of_all_.finish(*comm_);
  }

  /// What the host has to know of it: waits for an accelerator, once.
  void read_batch() {
    tensors losses;
    for (at::Tensor const& loss : executor_->losses()) {
      if (loss.defined()) losses.push_back(loss.reshape({}));  // one number, or an error
    }
    if (!losses.empty()) {
      at::Tensor const here = at::stack(losses).to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
      for (std::size_t m = 0; m < losses.size(); ++m) {
        if (batch_.counts_nothing(static_cast<int>(m))) continue;
        weighted_losses_[m] += here.const_data_ptr<double>()[m] * batch_.weight(static_cast<int>(m));
      }
    }
    rank_trace const& r = executor_->synchronize_record();
    input_.busy_seconds += r.busy_seconds();
    input_.span_seconds += r.span_seconds();
  }

  void zero_gradients() {
    for (auto const& g : gradients_) {
      if (g) g->zero();
    }
  }

  /// Asked by the executor after the forwards that may run before this is known; then gradients are written to again.
  bool last_step_stands() {
    bool stands = true;
    fill_in(update_->verdict(stands));
    if (!stands) buffers_before_.put_back();
    zero_gradients();
    batch_.scale_gradients(update_->loss_factor());
    return stands;
  }

  void fill_in(update_result const& result) {
    report_.loss = result.loss;
    report_.grad_norm = result.grad_norm;
    report_.skipped = result.skipped;
    report_.clipped = result.clipped;
    report_.loss_factor = result.loss_factor;
    report_.learning_rate = result.learning_rate;
    report_.bubble = result.bubble;
    report_.samples = result.samples;
    report_.samples_per_second = static_cast<double>(result.samples) / report_.seconds;
  }

  proved_program program_;
  transport* comm_;
  loss_function loss_;
  bool post_validation_;
  std::shared_ptr<compute_streams> streams_;
  std::vector<stage> stages_;
  std::vector<std::unique_ptr<gradient_buckets>> gradients_;  // by stage; null on other ranks
  tied_parameters tied_;
  std::unique_ptr<global_step> update_;
  detail::data_agreement data_;
  std::unique_ptr<executor> executor_;
  executor const* turn_ = nullptr;
  std::vector<std::int64_t> shapes_of_turn_, shapes_;
  gradient_reduction reduction_;
  loss_weight_function loss_weight_;
  std::optional<at::ScalarType> autocast_;
  split_batch batch_;
  double global_weight_ = 0;  // what this step counts over all replicas
  int passes_ = 0;            // runs of the program in this step so far
  bool last_pass_ = true;
  std::int64_t accumulating_ns_ = 0;
  int peak_in_flight_ = 0;
  bool launched_ = false;
  allocator_use memory_;
  std::vector<double> weighted_losses_;
  update_input input_;
  std::optional<update_result> result_;  // of the last step, if it was known at its end
  buffer_snapshot buffers_before_;
  replica_buffers buffers_of_all_;
  std::shared_ptr<checkpoint_session> checkpoints_;
  step_report report_;  // of the last step
  long step_ = 0;
};

}  // namespace chevron
