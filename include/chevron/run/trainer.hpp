#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/buffer_snapshot.hpp>
#include <chevron/run/data_agreement.hpp>
#include <chevron/run/device_graph.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/executor.hpp>
#include <chevron/run/gradients.hpp>
#include <chevron/run/lanes.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/optimizer_step.hpp>
#include <chevron/run/preflight.hpp>
#include <chevron/run/replica_buffers.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/stage_failure.hpp>
#include <chevron/run/tied.hpp>
#include <chevron/run/trainer_options.hpp>
#include <chevron/run/transport.hpp>

/// \file
/// Training: what a user touches.

namespace chevron {

/// Makes a stage, given its number. A trainer asks for the stages of its own rank only, one at a time in a process: seeding the
/// generator with the stage's number gives every layout the same weights.
using stage_builder = std::function<stage(int stage_number)>;

/// A program to run: one that owns its memory is kept, a view or a constant must outlive its use.
class runnable {
 public:
  runnable(program owned) : kept_(std::make_shared<program const>(std::move(owned))), view_(kept_->view()) {}  // NOLINT
  template <class Program>
  requires(std::convertible_to<Program const&, program_view> && !std::same_as<Program, program>) runnable(Program const& outlives)
      : view_(outlives) {}  // NOLINT
  /// A constant's copy that is about to be gone.
  template <class Program>
  requires(std::convertible_to<Program const&, program_view> && !std::same_as<Program, program> &&
           !std::same_as<Program, program_view>) runnable(Program const&& gone_soon) = delete;

  program_view view() const { return view_; }

 private:
  std::shared_ptr<program const> kept_;
  program_view view_;
};

struct checkpoint_session;

/// One rank's trainer. The same code drives threads and processes: build it on every rank with the same program, loss, optimizer
/// and options, then call `step` on every rank alike.
///
///     chevron::trainer train(program, line, build_stage, loss, chevron::optimizer<torch::optim::AdamW>(3e-4));
///     auto report = train.step({tokens}, {next_tokens});
///
/// All ranks of a pipeline take the same batch (each uses what its stages need), replicas take different ones: see sampler.hpp.
/// Ranks compare their batches in the first step (`trainer_options::check_data`). Errors are the typed ones of error.hpp; after
/// one that is no `usage_error` of the call's arguments the trainer is of no further use.
class trainer {
 public:
  /// Collective: compares program, options, parameters and buffers over the ranks.
  /// \throws preflight_error where ranks differ; usage_error for a stage that cannot be trained so
  trainer(runnable steps, transport& line, stage_builder const& build, loss_function loss, optimizer_factory const& make,
          trainer_options options = {})
      : program_(std::move(steps)),
        line_(&line),
        loss_(std::move(loss)),
        post_validation_(options.post_validation),
        on_(std::make_shared<lanes>(options.device, options.overlap_pairs || !options.device.is_cpu())),
        sums_(options.sums),
        weigh_(options.weigh) {
    collective_scope const doing(line, "making the trainer");
    program_view const p = program_.view();
    lanes::scope const here(*on_);
    check_layout(p);
    if (p.plan.forward_only)
      throw usage_error("this program only runs forward: train with a plan that has backwards, evaluate with this one");
    if (!loss_) throw usage_error("a trainer needs a loss function");
    detail::check(options);
    build_stages(p, build, options.broadcast_buffers);
    compare(line, lines(p, options));

    gradients_.resize(stages_.size());
    std::vector<stage_gradients*> views(stages_.size(), nullptr);
    std::vector<std::string> taken;
    int buckets = 0;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (!stages_[s]) continue;
      for (std::string& name : stages_[s].taken()) taken.push_back(std::move(name));
      gradients_[s] = std::make_unique<stage_gradients>(stages_[s], buckets, options.bucket_bytes);
      buckets += gradients_[s]->buckets();
      views[s] = gradients_[s].get();
    }
    buffers_before_ = buffer_snapshot(stages_);
    if (options.broadcast_buffers) buffers_of_all_ = replica_buffers(stages_, line.where(), on_->where(), buckets);
    tied_ = tied_parameters(p.plan, line, views);
    update_ = std::make_unique<global_update>(
        p.plan, line, std::move(views), taken, [this] { tied_.sum(*line_, executor_->slots()); }, make,
        update_options{options.clip_grad_norm, options.when_not_finite, options.learning_rate, options.post_validation,
                       options.calm_steps, options.scaling, options.sums, options.check_data, options.before_optimizer_step});
    data_ = update_->data();
    weighted_losses_.resize(static_cast<std::size_t>(p.plan.size.micro_batches));
    executor_hooks hooks;
    hooks.reduce_gradients = [this](int s) {
      if (last_pass_) gradients_[static_cast<std::size_t>(s)]->start_sum(*line_);
    };
    hooks.optimizer_step = [this] { finish_batch(); };
    bool const shared = std::any_of(gradients_.begin(), gradients_.end(), [](auto const& g) { return g && g->shares(); });
    if (shared) hooks.before_gradients = [this](int s) { gradients_[static_cast<std::size_t>(s)]->attach(); };
    hooks.seed = options.seed;
    hooks.autocast = autocast_ = options.autocast;
    hooks.on = on_;
    hooks.graphs = options.graphs;
    hooks.before_capture = [this] {
      for (auto const& g : gradients_) {
        if (g) g->attach_all();
      }
    };
    executor_ = std::make_unique<executor>(p, line, stages_, loss_, std::move(hooks));
  }

  trainer(trainer const&) = delete;
  trainer& operator=(trainer const&) = delete;

  /// One optimizer step over a batch of this replica, cut into the program's microbatches along dimension 0.
  /// \param all what all microbatches of this step count over all replicas, those accumulated before included: samples, if the
  /// options have no `weigh`. 0: every replica has as much as this one. With `over_replicas::sum`, over this replica only
  /// \returns its report; with `post_validation` that of the step before, since this one's is not known yet
  step_report step(batch const& whole, double all = 0) {
    std::int64_t const begin = now_ns();
    lanes::scope const here(*on_);
    cut(whole);
    return step_of_batch(begin, all);
  }
  /// The same over microbatches that the caller has cut, as many as the program runs; each may have sizes of its own.
  step_report step(std::vector<batch> const& micro_batches, double all = 0) {
    std::int64_t const begin = now_ns();
    lanes::scope const here(*on_);
    cut(micro_batches);
    return step_of_batch(begin, all);
  }
  /// The same without extras.
  step_report step(tensors const& inputs, tensors const& targets, double all = 0) { return step(batch{inputs, targets}, all); }

  /// Computes gradients and adds them to those of the next `step`, which must be given the same `all`: a batch too large for one
  /// run of the program is trained on by some calls of `accumulate` and then one of `step`.
  void accumulate(batch const& whole, double all) {
    lanes::scope const here(*on_);
    cut(whole);
    accumulate_batch(all);
  }
  void accumulate(std::vector<batch> const& micro_batches, double all) {
    lanes::scope const here(*on_);
    cut(micro_batches);
    accumulate_batch(all);
  }
  void accumulate(tensors const& inputs, tensors const& targets, double all) { accumulate(batch{inputs, targets}, all); }

  /// With `post_validation`: waits until the last step stands. To be called before parameters or the optimizer are looked at, and
  /// at the end; evaluation does so itself. Collective.
  /// \returns the report of the last step
  step_report settle() {
    if (update_->pending()) {
      lanes::scope const here(*on_);
      bool stands = true;
      fill_in(update_->verdict(stands));
    }
    return report_;
  }

  /// The stages by number; those of other ranks are empty.
  std::vector<stage>& stages() { return stages_; }
  /// This rank's optimizer; null if its stages have nothing to train.
  torch::optim::Optimizer* optimizer() { return update_->optimizer(); }
  transport& line() { return *line_; }
  program_view program() const { return program_.view(); }
  loss_function const& loss() const { return loss_; }
  std::optional<at::ScalarType> autocast() const { return autocast_; }
  /// The factor of loss scaling: part of what a checkpoint keeps.
  loss_scale& scaling() { return update_->scaling(); }
  /// What this rank did in its last step, and when.
  record const& last_record() const { return executor_->last_record(); }
  /// Seconds that this rank waited for the replicas' sums after the last gradients of its last step: what computation did not
  /// hide.
  double last_sum_wait() const { return update_->sum_wait(); }

  /// Why computations of the last step were not launched as graphs, in words; empty where they were.
  std::string why_not_launched() const { return executor_->why_not_launched(); }

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
  std::shared_ptr<lanes> const& on() const { return on_; }

  /// A batch with what this rank needs of it on its device. From pinned memory it is copied in the background: leave it alone
  /// until the step is over.
  batch on_device(batch const& whole) const {
    if (!on_->on_accelerator()) return whole;
    auto const brought = [&](at::Tensor const& t) { return t.defined() ? t.to(on_->where(), /*non_blocking=*/true) : t; };
    batch out = whole;
    if (stages_.front()) std::transform(out.inputs.begin(), out.inputs.end(), out.inputs.begin(), brought);
    if (stages_.back()) std::transform(out.targets.begin(), out.targets.end(), out.targets.begin(), brought);
    for (extra& e : out.extras) e.value = brought(e.value);
    return out;
  }
  std::vector<batch> on_device(std::vector<batch> const& micro_batches) const {
    if (!on_->on_accelerator()) return micro_batches;
    std::vector<batch> out;
    for (batch const& one : micro_batches) out.push_back(on_device(one));
    return out;
  }

  /// Gives each microbatch its share of the loss.
  /// \param all what microbatches count over all replicas; 0: every replica has as much as this one
  double weigh(split_batch& cut, double all) const {
    if (weigh_) cut.weigh(weigh_);
    if (!(all > 0)) all = cut.counts() * (sums_ == over_replicas::mean ? line_->where().replicas : 1);
    if (!(all > 0)) throw usage_error("the microbatches of this step count nothing: there is no mean loss");
    cut.share(all);
    return all;
  }

  /// Tells the transport whose slots come next, and that messages may have new shapes, when either changed.
  void take_turn(executor& next, split_batch const& cut) {
    line_->check_usable();
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
    if (p.plan.size.ranks != line_->where().pipeline_ranks) {
      throw usage_error("the program is for " + std::to_string(p.plan.size.ranks) + " pipeline ranks, there are " +
                        std::to_string(line_->where().pipeline_ranks));
    }
  }

  void build_stages(program_view const& p, stage_builder const& build, bool broadcast_buffers) {
    static std::mutex one_at_a_time;
    stages_.resize(static_cast<std::size_t>(p.plan.stages));
    for (int s = 0; s < p.plan.stages; ++s) {
      if (p.plan.rank_of_stage(s) != line_->where().pipeline_rank()) continue;
      std::lock_guard const hold(one_at_a_time);
      stage& made = stages_[static_cast<std::size_t>(s)];
      made = built(build, s);
      if (!made) throw usage_error("stage " + std::to_string(s) + " was built empty", {line_->where().global_rank, -1, -1, ""});
      for (parameter const& q : made.parameters()) {
        if (q.value.device() == on_->where()) continue;
        throw usage_error("stage " + std::to_string(s) + "'s " + q.name + " is on " + q.value.device().str() +
                              ", but the trainer's options say this rank computes on " + on_->where().str() +
                              ": build the stage there (module->to(device)), or change trainer_options::device",
                          {line_->where().global_rank, -1, -1, ""});
      }
      for (parameter const& b : made.buffers()) {
        if (line_->where().replicas == 1 || !broadcast_buffers || !b.value.defined()) continue;
        if (b.value.layout() == at::kStrided && !b.value.is_quantized()) continue;
        throw usage_error("stage " + std::to_string(s) + "'s buffer " + b.name +
                              " is sparse or quantized, and cannot be brought from replica 0 to the others. Remedy: a dense one, "
                              "or trainer_options::broadcast_buffers = false",
                          {line_->where().global_rank, -1, -1, ""});
      }
    }
    for (std::size_t a = 0; a < stages_.size(); ++a) {
      for (std::size_t b = a + 1; b < stages_.size(); ++b) check_apart(a, b);
    }
  }

  stage built(stage_builder const& build, int number) const {
    stage made;
    auto const who = [&] { return "building stage " + std::to_string(number) + " threw: "; };
    auto const where = [&] { return place{.rank = line_->where().global_rank}; };
    detail::telling_errors(line_, who, where, [&] {
      try {
        made = build(number);
      } catch (usage_error const&) {
        throw;
      } catch (error const& e) {
        detail::throw_stage_error(line_, who() + e.what(), where());
      }
    });
    return made;
  }

  void check_apart(std::size_t a, std::size_t b) const {
    for (parameter const& p : stages_[a].parameters()) {
      for (parameter const& q : stages_[b].parameters()) {
        if (p.value.is_same(q.value) && p.value.requires_grad() && (p.tied_as.empty() || p.tied_as != q.tied_as)) {
          throw usage_error("stages " + std::to_string(a) + " (" + p.name + ") and " + std::to_string(b) + " (" + q.name +
                            ") share a parameter: say so on both, as on any other layout, by stage.tie(\"" + p.name +
                            "\", \"a word for it\")");
        }
      }
    }
  }

  preflight_lines lines(program_view const& p, trainer_options const& options) const {
    preflight_lines out = common_lines(*line_);
    out.add(p);
    detail::add(out, options);
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s]) out.add(static_cast<int>(s), stages_[s], line_->where().replicas > 1, options.broadcast_buffers);
    }
    return out;
  }

  step_report step_of_batch(std::int64_t begin, double all) {
    if (passes_ > 0 && all != all_) refuse_other_total(all);
    all_ = weigh(batch_, all);
    run_batch(true);

    step_report const before = std::exchange(report_, {});
    report_.step = step_++;
    report_.seconds = static_cast<double>(now_ns() - begin + accumulating_ns_) * 1e-9;
    report_.peak_in_flight = peak_in_flight_;
    report_.launched = launched_;
    report_.memory = memory_;
    if (result_) fill_in(*result_);
    passes_ = 0;
    accumulating_ns_ = 0;
    return post_validation_ ? before : report_;
  }

  void accumulate_batch(double all) {
    std::int64_t const begin = now_ns();
    if (!(all > 0))
      throw usage_error(
          "accumulate() needs to know what the whole step counts over all replicas: so many samples, if nothing else is weighed");
    if (passes_ > 0 && all != all_) refuse_other_total(all);
    all_ = weigh(batch_, all);
    run_batch(false);
    ++passes_;
    accumulating_ns_ += now_ns() - begin;
  }

  [[noreturn]] void refuse_other_total(double all) const {
    throw usage_error("the batches of one step were weighed as shares of " + detail::plain(all_) + " and of " +
                      detail::plain(all) + ": give accumulate() and step() the same total");
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
    input_.all_counts = all_;
    input_.data = data_.numbers();
    buffers_of_all_.start(*line_);
    result_ = update_->run(step_, input_, [this] { read_batch(); });
    data_.was_compared();
    buffers_of_all_.finish(*line_);
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
    record const& r = executor_->settle_record();
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

  runnable program_;
  transport* line_;
  loss_function loss_;
  bool post_validation_;
  std::shared_ptr<lanes> on_;
  std::vector<stage> stages_;
  std::vector<std::unique_ptr<stage_gradients>> gradients_;  // by stage; null on other ranks
  tied_parameters tied_;
  std::unique_ptr<global_update> update_;
  detail::data_agreement data_;
  std::unique_ptr<executor> executor_;
  executor const* turn_ = nullptr;
  std::vector<std::int64_t> shapes_of_turn_, shapes_;
  over_replicas sums_;
  weigher weigh_;
  std::optional<at::ScalarType> autocast_;
  split_batch batch_;
  double all_ = 0;  // what this step counts over all replicas
  int passes_ = 0;  // runs of the program in this step so far
  bool last_pass_ = true;
  std::int64_t accumulating_ns_ = 0;
  int peak_in_flight_ = 0;
  bool launched_ = false;
  device_memory_use memory_;
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
