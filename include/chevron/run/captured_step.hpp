#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <chevron/run/capture_state.hpp>
#include <chevron/run/device_graph.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/lanes.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/stage.hpp>

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
  void take(tensors& came) const {
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

/// All of a rank's program, with targets and extras in memory of their own.
class captured_step {
 public:
  captured_step(std::shared_ptr<graph_maker> maker, std::shared_ptr<lanes> on, std::size_t instructions)
      : maker_(std::move(maker)), on_(std::move(on)), state_(maker_->why_not(*on_)), computations_(instructions) {}

  capture_state& state() { return state_; }
  captured_computation& of(std::size_t position) { return computations_[position]; }

  /// Lets go of the graphs there are, and makes room for targets and extras.
  /// \returns the batch to capture with
  split_batch begin(split_batch const& live, bool with_targets) {
    clear();
    maker_->begin(*on_);
    std::vector<batch> parts(static_cast<std::size_t>(live.count()));
    for (int m = 0; m < live.count(); ++m) {
      batch& part = parts[static_cast<std::size_t>(m)];
      part.inputs = live.inputs(m);
      part.targets = live.targets(m);
      if (with_targets) {
        for (at::Tensor& t : part.targets) t = own(t);
      }
      for (extra const& e : live.extras(m)) part.extras.push_back({e.name, own(e.value), e.whole});
      targets_.push_back(with_targets ? part.targets : tensors());
      extras_.emplace_back();
      for (extra const& e : part.extras) extras_.back().push_back(e.value);
    }
    split_batch out;
    out.take(parts, live.count());
    return out;
  }
  void capture(captured_computation& into, std::function<void()> const& work) { into.graph = maker_->capture(*on_, work); }

  /// Brings a batch's targets and extras to where graphs look for them.
  void take(split_batch const& live) {
    for (std::size_t m = 0; m < targets_.size(); ++m) {
      tensors const& targets = live.targets(static_cast<int>(m));
      for (std::size_t k = 0; k < targets_[m].size(); ++k) targets_[m][k].copy_(targets[k], /*non_blocking=*/true);
      std::span<extra const> const extras = live.extras(static_cast<int>(m));
      for (std::size_t k = 0; k < extras_[m].size(); ++k) {
        if (extras_[m][k].defined()) extras_[m][k].copy_(extras[k].value, /*non_blocking=*/true);
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

 private:
  static at::Tensor own(at::Tensor const& live) { return live.defined() ? at::empty_like(live) : live; }

  std::shared_ptr<graph_maker> maker_;
  std::shared_ptr<lanes> on_;
  capture_state state_;
  std::vector<captured_computation> computations_;  // by position in the program
  std::vector<tensors> targets_, extras_;           // by microbatch
};

}  // namespace chevron
