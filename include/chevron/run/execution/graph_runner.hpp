#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/device/device_graph.hpp>
#include <chevron/run/execution/capture_policy.hpp>
#include <chevron/run/execution/gradient_store.hpp>
#include <chevron/run/execution/stage_runner.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/trace/allocator_stats.hpp>

/// \file
/// A rank's computations as graphs, one for each F, B, I, W or fused pair, and the memory they share with what is around them.

namespace chevron {

namespace detail {

/// Shape, strides and dtype of a tensor, without its memory.
inline at::Tensor outline_of(at::Tensor const& t) {
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
}
inline at::Tensor room_for(at::Tensor const& outline, at::Device where) {
  if (!outline.defined()) return outline;
  return at::empty_strided(outline.sizes(), outline.strides(), outline.options().device(where));
}

/// The rest of LibTorch's messages is about how to debug LibTorch.
inline std::string first_line(std::string const& words) { return words.substr(0, words.find('\n')); }

/// A tensor's memory, without keeping it: what graphs allocated stays where it is while they live, though nobody holds it.
inline at::Tensor place_of(at::Tensor const& t) {
  if (!t.defined() || t.numel() == 0) return t;
  return at::for_blob(t.data_ptr(), t.sizes())
      .strides(t.strides())
      .options(t.options().requires_grad(false))
      .target_device(t.device())
      .make_tensor();
}

}  // namespace detail

/// One computation of a captured step.
///
/// Between graphs, memory is used as it is when the same program runs kernel by kernel: it is freed, and given out again, in the
/// same order. What is written into it from outside is written when the program comes to the computation, not before.
struct captured_computation {
  tensors seen;                         ///< outlines of what came from another rank when it last ran kernel by kernel
  std::unique_ptr<device_graph> graph;  ///< of a fused pair it is with the first half
  tensors arriving;                     ///< where that is to be written before the launch; the batch, too
  tensors departing;                    ///< what another rank gets
  at::Tensor loss;

  /// Brings what came to where it was captured with.
  void copy_in(tensors& came) const {
    bool fits = came.size() == arriving.size();
    for (std::size_t k = 0; fits && k < came.size(); ++k) {
      fits =
          came[k].defined() == arriving[k].defined() &&
          (!came[k].defined() || (came[k].sizes() == arriving[k].sizes() && came[k].scalar_type() == arriving[k].scalar_type()));
    }
    if (!fits) {
      throw usage_error(
          "other tensors came than when the step was captured, though the batch has the same shapes. "
          "Remedy: stages whose outputs' shapes follow from their inputs', or no graphs");
    }
    for (std::size_t k = 0; k < came.size(); ++k) {
      if (came[k].defined()) at::Tensor(arriving[k]).copy_(came[k], /*non_blocking=*/true);
    }
    came.clear();
  }
};

/// A rank's program as graphs, with targets and side inputs in memory of their own.
///
/// Where runs repeat themselves (capture_policy.hpp), each computation is captured, in the order of the program, before one of
/// them begins; from then on it is launched as a whole. All else goes as it does without: the executor posts messages and waits
/// for them in between, starts sums, lets the optimizer step, and keeps a record.
class graph_runner {
 public:
  /// \param gradients null where nothing is trained
  graph_runner(std::shared_ptr<graph_maker> maker, program_view steps, int rank, stage_runner& work, allocator_stats& memory,
               gradient_store* gradients)
      : maker_(std::move(maker)),
        program_(steps),
        rank_(rank),
        work_(&work),
        memory_(&memory),
        gradients_(gradients),
        state_(maker_->why_not(work.streams())),
        computations_(static_cast<std::size_t>(steps.length(rank))) {}

  /// Decides how a run goes, and sees to what it needs for that.
  /// \param guarded runs a function for an instruction, and says of its errors whose they are
  /// \returns whether computations are launched
  template <class Guarded>
  bool prepare(split_batch const& batch, Guarded const& guarded) {
    run_signature now;
    batch.append_shapes(now.shapes);
    for (stage const& s : work_->stages()) {
      for (auto const* list : {&s.parameters(), &s.buffers()}) {
        for (parameter const& p : *list) now.memory.push_back(p.value.defined() ? p.value.const_data_ptr() : nullptr);
      }
    }
    run_mode const mode = batch.any_counts_nothing()   ? state_.not_now("a microbatch of this step counts nothing")
                          : std::isnan(batch.counts()) ? state_.not_now("this rank was not given what microbatches count")
                                                       : state_.next(std::move(now));
    if (mode == run_mode::one_by_one || (mode == run_mode::capture && !capture_all(batch, guarded))) return false;
    take_surroundings(batch);
    return true;
  }

  /// What came from another rank for a computation that runs kernel by kernel.
  void record_signature(instruction const& i, tensors const& came) {
    tensors& seen = of(i).seen;
    seen.clear();
    for (at::Tensor const& t : came) seen.push_back(detail::outline_of(t));
  }
  void mark_stochastic(instruction const& i) { state_.drew(static_cast<int>(i.op.stage)); }

  /// Brings what came to where the computation was captured with it.
  void copy_in(instruction const& i, tensors& came) { of(i).copy_in(came); }
  /// The same for the gradient of a microbatch's loss.
  void copy_in(instruction const& i, double gradient) { of(i).arriving.front().fill_(gradient); }
  /// Launches what was captured from this instruction on: a computation, or a fused pair.
  void launch(instruction const& i) { of(i).graph->launch(); }
  /// What a launched computation leaves, to where it would have left it.
  /// \param copies whoever gets it may still read it when the graph is launched again
  void copy_out(instruction const& i, bool copies) {
    captured_computation const& c = of(i);
    activation& slot = work_->of(i);
    slot.loss = c.loss;
    tensors& out = i.op.kind == kind::forward ? slot.outputs : slot.input_gradients;
    out.clear();
    for (at::Tensor const& t : c.departing) out.push_back(copies && t.defined() ? t.clone() : t);
  }

  /// Why the last run was not launched; empty where it was.
  std::string const& why_not() const { return state_.why_not(); }
  /// Bytes of the device that were in use at one time when the program was captured.
  std::int64_t bytes() const { return bytes_; }

 private:
  captured_computation& of(instruction const& i) { return computations_[static_cast<std::size_t>(&i - &program_.at(rank_, 0))]; }

  /// Captures every computation of the program. Nothing is computed, and other ranks notice nothing: where a message would be
  /// received there is room for it, and what would be sent is kept until it would have gone.
  /// \returns whether it could be done
  template <class Guarded>
  bool capture_all(split_batch const& live, Guarded const& guarded) {
    std::vector<tensors> sending(static_cast<std::size_t>(program_.slots[rank_].send));
    bool done = true;
    try {
      if (gradients_ != nullptr) gradients_->attach_all();
      split_batch const batch = begin(live);
      for (int next = 0; next < program_.length(rank_);) {
        instruction const& i = program_.at(rank_, next);
        if (is_compute(i.op.kind) && !is_own(i.op.kind)) {
          guarded(i, [&] { next = capture(next, batch); });
          continue;
        }
        if (i.op.kind == kind::send_forward) sending[i.source] = std::move(work_->of(i).outputs);
        if (i.op.kind == kind::send_backward) sending[i.source] = std::move(work_->of(i).input_gradients);
        if (i.op.kind == kind::wait_send_forward || i.op.kind == kind::wait_send_backward) sending[i.source].clear();
        ++next;
      }
      state_.captured();
    } catch (std::exception const& e) {
      clear();
      state_.failed(detail::first_line(e.what()));
      done = false;
    }
    work_->drop();
    for (at::Tensor& loss : work_->losses()) loss = at::Tensor();
    bytes_ = done ? memory_->peak(0).active : 0;
    return done;
  }

  /// Captures the computation at this position, or a fused pair, and gives the position of the next.
  int capture(int position, split_batch const& batch) {
    instruction const& i = program_.at(rank_, position);
    attach(i);
    if (i.op.fused == 0 || !work_->streams().two()) {
      capture(of(i), [&] {
        tensors given = room_for(i, batch);
        if (i.op.kind == kind::forward) work_->of(i).lane = 0;
        work_->compute(i, batch, std::nullopt, given);
      });
      keep(i);
      return position + 1;
    }
    instruction const& b = program_.at(rank_, position + 1);
    attach(b);
    capture(of(i), [&] {
      tensors inputs = room_for(i, batch), gradients = room_for(b, batch);
      work_->beside(
          i, b, inputs, [&] { work_->compute(i, batch, std::nullopt, inputs); },
          [&] { work_->compute(b, batch, std::nullopt, gradients); });
    });
    keep(i);
    keep(b);
    return position + 2;
  }
  void attach(instruction const& i) {
    if (i.op.kind != kind::forward && gradients_ != nullptr) gradients_->attach(static_cast<int>(i.op.stage));
  }
  void capture(captured_computation& into, std::function<void()> const& work) {
    into.graph = maker_->capture(work_->streams(), work);
  }

  /// Within a capture: memory for what will come from outside, or what the computation before left on this rank.
  tensors room_for(instruction const& i, split_batch const& batch) {
    captured_computation& c = of(i);
    auto const from_outside = [&](tensors const& like) {
      tensors into;
      for (at::Tensor const& one : like) into.push_back(detail::room_for(detail::outline_of(one), work_->streams().where()));
      for (at::Tensor const& made : into) c.arriving.push_back(detail::place_of(made));
      return into;
    };
    if (row_of(i.op.kind).from == 0) return {};
    if (i.op.kind == kind::forward) {
      if (i.op.stage == 0) return from_outside(batch.inputs(static_cast<int>(i.op.micro_batch)));
      return i.local != no_slot ? std::exchange(work_->neighbour_of(i).outputs, {}) : from_outside(c.seen);
    }
    if (work_->is_last(i)) return from_outside({work_->losses()[i.op.micro_batch]});
    return i.local != no_slot ? std::exchange(work_->neighbour_of(i).input_gradients, {}) : from_outside(c.seen);
  }

  /// After a capture: what others will look for.
  void keep(instruction const& i) {
    captured_computation& c = of(i);
    activation& slot = work_->of(i);
    auto const s = static_cast<int>(i.op.stage);
    plan_view const& plan = program_.plan;
    auto const elsewhere = [&](int other) { return other >= 0 && other < plan.stages && plan.rank_of_stage(other) != rank_; };
    if (i.op.kind == kind::forward) {
      if (work_->is_last(i)) c.loss = work_->losses()[i.op.micro_batch] = std::exchange(slot.loss, {});
      if (elsewhere(s + 1)) {
        for (at::Tensor const& t : slot.outputs) c.departing.push_back(detail::place_of(t));
      }
    } else if (makes_input_gradient(i.op.kind) && elsewhere(s - 1)) {
      for (at::Tensor const& t : slot.input_gradients) c.departing.push_back(detail::place_of(t));
    }
  }

  /// Lets go of the graphs there are, and makes room for targets and side inputs.
  /// \returns the batch to capture with
  split_batch begin(split_batch const& live) {
    clear();
    maker_->begin(work_->streams());
    bool const with_targets = static_cast<bool>(work_->stages().back());
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
    return out;
  }
  /// Brings a batch's targets and side inputs to where graphs look for them.
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
      c.graph.reset();
      c.arriving.clear();
      c.departing.clear();
      c.loss = at::Tensor();
    }
    targets_.clear();
    extras_.clear();
  }

  static at::Tensor own(at::Tensor const& live) { return live.defined() ? at::empty_like(live) : live; }

  std::shared_ptr<graph_maker> maker_;
  program_view program_;
  int rank_;
  stage_runner* work_;
  allocator_stats* memory_;
  gradient_store* gradients_;
  capture_policy state_;
  std::vector<captured_computation> computations_;  // by position in the program
  std::vector<tensors> targets_, extras_;           // by microbatch
  std::int64_t bytes_ = 0;
};

}  // namespace chevron
