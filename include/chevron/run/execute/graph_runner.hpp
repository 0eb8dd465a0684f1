#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/run/core/allocator_stats.hpp>
#include <chevron/run/core/device_graph.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/execute/action_record.hpp>
#include <chevron/run/execute/capture_policy.hpp>
#include <chevron/run/execute/gradient_store.hpp>
#include <chevron/run/execute/operation.hpp>
#include <chevron/run/execute/stage_runner.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Captures each of a rank's computations (F, B, I, W, R or a fused pair) as a graph of the device, and launches these graphs.

namespace chevron::detail {

/// A new tensor with the shape, strides and dtype of `like`; on `at::kMeta` without memory.
inline at::Tensor room_for(at::Tensor const& like, at::Device where) {
  if (!like.defined()) return like;
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(where).pinned_memory(false));
}

/// A tensor over the memory of `t`, without owning it: memory allocated during a capture is not freed while the graph exists.
inline at::Tensor place_of(at::Tensor const& t) {
  if (!t.defined() || t.numel() == 0) return t;
  return at::for_blob(t.data_ptr(), t.sizes())
      .strides(t.strides())
      .options(t.options().requires_grad(false))
      .target_device(t.device())
      .make_tensor();
}

/// One captured computation of a step.
///
/// Graphs of one program share memory: as in the program without graphs, memory that a computation frees is allocated to later
/// computations. So received tensors are copied into a graph's memory when the program reaches the computation, not earlier.
struct captured_computation {
  tensors seen;                         ///< shapes, strides and dtypes received in the last run without graphs
  std::unique_ptr<device_graph> graph;  ///< a fused pair's graph is stored with the pair's first half
  tensors arriving;                     ///< the graph's memory for received tensors, or for inputs of the batch
  at::Tensor weight;                    ///< the graph's memory for the gradient of the loss
  tensors departing;                    ///< the graph's results that are sent to another rank
  at::Tensor loss;                      ///< the loss from the last stage's F
  tensors losses;                       ///< the declared losses of an F's stage
  tensors seeds;                        ///< the graph's memory for gradients of declared losses

  /// Copies received tensors into the graph's memory.
  /// \throws usage_error if their shapes or dtypes differ from those at the capture
  void copy_in(tensors& came) const {
    auto const alike = [](at::Tensor const& a, at::Tensor const& b) {
      return a.defined() == b.defined() && (!a.defined() || (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type()));
    };
    if (!std::equal(came.begin(), came.end(), arriving.begin(), arriving.end(), alike)) {
      throw usage_error(
          "tensors arrived with other shapes or dtypes than when the step was captured, though the batch has the same shapes. "
          "Remedy: stages whose outputs' shapes follow from their inputs', or no graphs");
    }
    for (std::size_t k = 0; k < came.size(); ++k) {
      if (came[k].defined()) at::Tensor(arriving[k]).copy_(came[k], /*non_blocking=*/true);
    }
    came.clear();
  }
};

/// Launches a rank's computations as graphs, in the slots of a stage runner, with which it captures them. Copies targets and
/// side inputs to memory that graphs read.
///
/// If successive runs have equal shapes and memory (capture_policy.hpp), captures each computation as one graph, in the order
/// of the program, before a run begins, and launches the graphs in this and later runs.
class graph_runner {
 public:
  /// \param eager     runs computations kernel by kernel; must outlive this object
  /// \param memory    the figures of the device's allocator
  /// \param gradients null if no stage is trained
  /// \param copies    true: clone sent tensors, since a receiver gets the sender's memory, and may read it at the next launch
  graph_runner(std::shared_ptr<graph_maker> maker, program_view const& steps, int rank, stage_runner& eager,
               allocator_stats& memory, gradient_store* gradients, bool copies)
      : maker_(std::move(maker)),
        program_(steps),
        rank_(rank),
        eager_(&eager),
        memory_(&memory),
        gradients_(gradients),
        copies_(copies),
        state_(maker_->why_not(eager.streams())),
        computations_(static_cast<std::size_t>(steps.length(rank))) {}

  /// Begins a run: chooses whether the run launches graphs, and captures them if they are missing.
  /// \param all the rank's operations in order \param record locates errors
  void begin(std::span<operation const> all, split_batch const& batch, action_record const& record) {
    run_signature now;
    batch.append_shapes(now.shapes);
    for (stage const& s : eager_->stages()) {
      for (auto const* list : {&s.parameters(), &s.buffers()}) {
        for (parameter const& p : *list) now.memory.push_back(p.value.defined() ? p.value.const_data_ptr() : nullptr);
      }
    }
    run_mode const mode = batch.any_counts_nothing() ? state_.not_now("a microbatch of this step counts nothing")
                          : batch.any_unknown()      ? state_.not_now("this rank has no weights of microbatches")
                                                     : state_.next(std::move(now));
    launching_ = mode == run_mode::launch || (mode == run_mode::capture && capture_all(all, batch, record));
    if (launching_) take_surroundings(batch);
  }
  /// Whether this run's computations are launched as graphs.
  bool launches() const { return launching_; }
  /// The reason why the last run launched no graphs, in words; empty if it launched graphs.
  std::string const& why_not() const { return state_.why_not(); }
  /// The peak of memory in use while the program was captured, in bytes; 0 if this run launches no graphs.
  std::int64_t captured_bytes() const { return launching_ ? bytes_ : 0; }

  /// Called with the inputs of F, or the gradients of the outputs for B and I, once they have arrived. Copies them into the
  /// graph's memory. In a run without graphs, stores the shapes, strides and dtypes of received tensors for a later capture.
  void bring(operation const& o, tensors& came) {
    if (launching_) return of(o).copy_in(came);
    if (o.what->source == no_slot) return;
    tensors& seen = of(o).seen;
    seen.clear();
    for (at::Tensor const& t : came) seen.push_back(detail::room_for(t, at::kMeta));
  }
  /// Launches a computation's graph (a fused pair's graph at the first half), and puts the results into the operation's slot.
  void launch(operation const& o, split_batch const& batch) {
    captured_computation const& c = of(o);
    if (c.graph) {
      for (operation const* half = &o; half != nullptr; half = half->other_half) bring_gradients_of_losses(*half, batch);
      c.graph->launch();
    }
    o.slot->loss = c.loss;
    o.slot->losses = c.losses;
    if (o.gives == nullptr) return;
    o.gives->clear();
    for (at::Tensor const& t : c.departing) o.gives->push_back(copies_ && t.defined() ? t.clone() : t);
  }
  /// Called after a computation: no later run launches graphs if the stage drew random numbers.
  void retire(operation const& o) {
    if (std::exchange(o.slot->drew, false)) state_.drew(o.stage());
  }

 private:
  captured_computation& of(operation const& o) {
    return computations_[static_cast<std::size_t>(o.what - &program_.at(rank_, 0))];
  }

  /// Writes the gradients of the loss and of declared losses into the graph's memory.
  void bring_gradients_of_losses(operation const& o, split_batch const& batch) {
    captured_computation const& c = of(o);
    if (c.weight.defined()) c.weight.fill_(batch.gradient_weight(o.micro_batch()));
    for (std::size_t k = 0; k < c.seeds.size(); ++k)
      c.seeds[k].fill_(batch.loss_gradient(eager_->first_loss(o.stage()) + k, o.micro_batch()));
  }

  /// Captures every computation of the program. A capture computes nothing and sends nothing: for a message to be received,
  /// memory is allocated, and a message's tensors are not freed from the send to the wait for the send, as in a run.
  /// \returns whether the capture succeeded
  bool capture_all(std::span<operation const> all, split_batch const& live, action_record const& record) {
    std::vector<tensors> sending(static_cast<std::size_t>(program_.slots[rank_].send));
    bool done = true;
    try {
      if (gradients_ != nullptr) gradients_->attach_all();
      split_batch const batch = begin_capture(live);
      for (operation const& o : all) {
        if (o.computes()) {
          record.guard_alone(*o.what, [&] { o.other_half != nullptr ? capture_pair(o, batch) : capture(o, batch); });
        } else if (o.takes != nullptr) {
          sending[o.what->source] = std::move(*o.takes);
        } else if (is_wait(o.what->op.kind)) {
          sending[o.what->source].clear();
        }
      }
      state_.captured();
    } catch (std::exception const& e) {
      clear();
      std::string const words = e.what();
      state_.failed(words.substr(0, words.find('\n')));  // further lines tell how to debug LibTorch
      done = false;
    }
    eager_->drop();
    for (at::Tensor& loss : eager_->losses()) loss = at::Tensor();
    bytes_ = done ? memory_->peak(0).active : 0;
    return done;
  }

  void capture(operation const& o, split_batch const& batch) {
    if (o.what->op.kind == kind::forward) o.slot->lane = 0;
    attach(o);
    of(o).graph = maker_->capture(eager_->streams(), [&] {
      tensors given = room_for(o, batch);
      compute(o, batch, given);
    });
    keep(o);
  }
  void capture_pair(operation const& f, split_batch const& batch) {
    operation const& b = *f.other_half;
    attach(b);
    of(f).graph = maker_->capture(eager_->streams(), [&] {
      tensors inputs = room_for(f, batch), gradients = room_for(b, batch);
      eager_->beside(
          f, b, inputs, [&] { compute(f, batch, inputs); }, [&] { compute(b, batch, gradients); });
    });
    keep(f);
    keep(b);
  }
  /// Runs a computation within a capture.
  void compute(operation const& o, split_batch const& batch, tensors& given) {
    tensors& seeds = of(o).seeds;
    eager_->compute(o, {.batch = &batch, .seeds = &seeds}, given);
    for (at::Tensor& seed : seeds) seed = detail::place_of(seed);
  }
  void attach(operation const& o) {
    if (runs_backward(o.what->op.kind) && gradients_ != nullptr) gradients_->attach(o.stage());
  }

  /// The arguments with which a computation is captured: new tensors in place of received tensors, of the batch or of the
  /// gradient of the loss; or the results of the neighbouring stage on this rank.
  tensors room_for(operation const& o, split_batch const& batch) {
    captured_computation& c = of(o);
    auto const from_outside = [&](tensors const& like) {
      tensors into;
      for (at::Tensor const& one : like) into.push_back(detail::room_for(one, eager_->streams().where()));
      for (at::Tensor const& made : into) c.arriving.push_back(detail::place_of(made));
      return into;
    };
    kind_row const& row = row_of(o.what->op.kind);
    if (row.from == 0) return {};
    if (o.takes != nullptr) return std::exchange(*o.takes, {});
    if (o.what->source != no_slot) return from_outside(c.seen);
    if (row.from < 0) return from_outside(batch.inputs(o.micro_batch()));
    at::Tensor const gradient = detail::room_for(eager_->losses()[o.what->op.micro_batch], eager_->streams().where());
    c.weight = detail::place_of(gradient);
    return {gradient};
  }

  /// Stores the results of a captured computation that messages, losses and later computations read.
  void keep(operation const& o) {
    captured_computation& c = of(o);
    c.losses = o.slot->losses;
    c.loss = o.slot->loss;
    eager_->retire(o);
    if (step_graph(program_.plan).crosses(o.what->op) == step_graph::none) return;
    for (at::Tensor const& t : *o.gives) c.departing.push_back(detail::place_of(t));
  }

  /// Drops earlier graphs, and allocates the graphs' memory for targets and side inputs.
  /// \returns the batch to capture with
  split_batch begin_capture(split_batch const& live) {
    clear();
    maker_->begin(eager_->streams());
    bool const with_targets = detail::takes_targets(eager_->stages());
    std::vector<batch> parts(static_cast<std::size_t>(live.count()));
    for (int m = 0; m < live.count(); ++m) {
      batch& part = parts[static_cast<std::size_t>(m)];
      part.inputs = live.inputs(m);
      part.targets = live.targets(m);
      if (with_targets) {
        for (at::Tensor& t : part.targets) t = own(t);
      }
      for (side_input const& e : live.side_inputs(m)) part.side_inputs.push_back({e.name, own(e.value), e.whole});
      targets_.push_back(with_targets ? part.targets : tensors());
      extras_.emplace_back();
      for (side_input const& e : part.side_inputs) extras_.back().push_back(e.value);
    }
    split_batch out;
    out.take(parts, live.count());
    out.share_losses_as(live);
    return out;
  }
  /// Copies a batch's targets and side inputs into the graphs' memory.
  void take_surroundings(split_batch const& live) {
    for (std::size_t m = 0; m < targets_.size(); ++m) {
      tensors const& targets = live.targets(static_cast<int>(m));
      for (std::size_t k = 0; k < targets_[m].size(); ++k) targets_[m][k].copy_(targets[k], /*non_blocking=*/true);
      std::span<side_input const> const side_inputs = live.side_inputs(static_cast<int>(m));
      for (std::size_t k = 0; k < extras_[m].size(); ++k) {
        if (extras_[m][k].defined()) extras_[m][k].copy_(side_inputs[k].value, /*non_blocking=*/true);
      }
    }
  }

  void clear() {
    for (captured_computation& c : computations_) {
      tensors seen = std::exchange(c, {}).seen;
      c.seen = std::move(seen);
    }
    targets_.clear();
    extras_.clear();
  }

  static at::Tensor own(at::Tensor const& live) { return live.defined() ? at::empty_like(live) : live; }

  std::shared_ptr<graph_maker> maker_;
  program_view program_;
  int rank_;
  stage_runner* eager_;
  allocator_stats* memory_;
  gradient_store* gradients_;
  bool copies_;
  bool launching_ = false;
  capture_policy state_;
  std::vector<captured_computation> computations_;  // by position in the program
  std::vector<tensors> targets_, extras_;           // by microbatch
  std::int64_t bytes_ = 0;
};

}  // namespace chevron::detail
