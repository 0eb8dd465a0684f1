#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/companion.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/own_versions.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Carries of a stage from and for other slices of a sequence: they enter and leave the graphs of the stage's sections.

namespace chevron::detail {

/// The carries of one section of a stage and one slice, from F to B or W. Vectors of carries, and of carries' gradients, have
/// one entry for each carry of the whole stage, in the order of declaration; a section reads and writes its own entries.
///
/// If later slices pass a carry on unchanged, such as the keys of a slice, the carry's gradient is a sum over these slices.
/// Autograd would sum in the carry's dtype, and in half precision would round after each slice. So for a carry in half
/// precision that is passed on unchanged, `leave` adds no output to the graph: this class sums the slices' gradients in single
/// precision, and rounds once, for the slice that created the carry. In other dtypes autograd sums, in the un-pipelined order.
class section_carries {
 public:
  /// Reads the declared carries of a section. \param first, last the section's parts: [first, last) of the stage
  /// \param lowest the stage's lowest trained part; carries of parts below have no gradient \param trained a backward follows
  void lay_out(stage const& owner, std::size_t first, std::size_t last, std::size_t lowest, bool trained) {
    begin_ = owner.carries_before(first);
    ways_.clear();
    for (std::size_t p = first; p < last; ++p) {
      for (stage_carry const& one : owner.carries_of(p))
        ways_.push_back({.name = one.name, .flows = trained && p >= lowest && !one.detached});
    }
  }

  /// F: records the dtypes of the previous slice's carries, and which carries get a gradient.
  void arrive(tensors const& carries) {
    for (std::size_t k = 0; k < ways_.size(); ++k) {
      at::Tensor const& value = carries[begin_ + k];
      ways_[k].arrived = value.scalar_type();
      ways_[k].entered = ways_[k].flows && carries_gradient(value);
    }
  }
  /// Whether the previous slice gets gradients of carries from this slice.
  bool gives_gradients() const {
    return std::any_of(ways_.begin(), ways_.end(), [](way const& one) { return one.entered; });
  }
  /// Stores the carries of the previous slice, for a second run of the forward.
  void keep(tensors const& carries) {
    if (ways_.empty()) return;
    tensors own(carries.begin() + static_cast<std::ptrdiff_t>(begin_), carries.begin() + static_cast<std::ptrdiff_t>(end()));
    kept_.keep(own);
  }
  /// Checks that no stored carry was changed in place since `keep`. \param change the error's sentence up to the tensor
  /// \throws usage_error if a carry was changed
  void check_kept(char const* change) const { kept_.check(change, "carry"); }
  /// Moves the stored carries to the stage's carries.
  void take_kept(tensors& carries) {
    if (ways_.empty()) return;
    carries.resize(std::max(carries.size(), end()));
    tensors own = kept_.take();
    for (std::size_t k = 0; k < own.size(); ++k) carries[begin_ + k] = std::move(own[k]);
  }
  /// Connects the carries that get a gradient to the graph (`stage_graph::follow`).
  void enter(stage_graph& graph, tensors& carries) const {
    for (std::size_t k = 0; k < ways_.size(); ++k) {
      if (ways_[k].entered) graph.follow(carries[begin_ + k]);
    }
  }
  /// Stores the carries that the forward is about to get, until `note`.
  void remember(tensors const& carries) {
    for (std::size_t k = 0; k < ways_.size(); ++k) ways_[k].came = carries[begin_ + k];
  }

  /// Records which carries that the forward returned get a gradient, and which were passed on unchanged.
  /// \throws usage_error for a carry that was defined before this slice's forward, and now is undefined or has another dtype
  void note(tensors const& carries) {
    for (std::size_t k = 0; k < ways_.size(); ++k) {
      way& one = ways_[k];
      at::Tensor const& value = carries[begin_ + k];
      if (one.arrived != at::ScalarType::Undefined && value.scalar_type() != one.arrived) {
        throw usage_error(
            "carry `" + one.name + "` is " + words_of(one.arrived) + " before this slice and " + words_of(value.scalar_type()) +
            " after it. Remedy: one dtype in all slices, and where a document begins an empty tensor or zeros, not an "
            "undefined tensor");
      }
      one.left = one.flows && carries_gradient(value);
      one.dtype = value.scalar_type();
      at::Tensor const came = std::exchange(one.came, {});
      bool const half = value.defined() && at::isReducedFloatingType(value.scalar_type());
      one.handed_on = one.left && one.entered && half && value.is_same(came);
    }
  }
  /// Adds carries that get a gradient to the graph's outputs, at the end.
  void leave(stage_graph& graph, tensors const& carries) const {
    for (std::size_t k = 0; k < ways_.size(); ++k) {
      if (ways_[k].ends()) graph.leave(std::span(&carries[begin_ + k], 1));
    }
  }

  /// Appends the gradients of the carries that F returned to the gradients of the outputs.
  void append_gradients(tensors const& of_carries, tensors& output_gradients) const {
    for (std::size_t k = 0; k < ways_.size(); ++k) {
      if (ways_[k].ends()) output_gradients.push_back(rounded(of_carries[begin_ + k], ways_[k].dtype));
    }
  }
  /// Moves the gradients of the carries that F received from the end of `input_gradients` to `of_carries`; for a carry that F
  /// passed on unchanged, adds to the gradient in `of_carries`.
  void take_gradients(tensors& input_gradients, tensors& of_carries) const {
    for (std::size_t k = ways_.size(); k-- > 0;) {
      at::Tensor const of_later = std::exchange(of_carries[begin_ + k], {});
      if (!ways_[k].entered) continue;
      at::Tensor own = std::move(input_gradients.back());
      input_gradients.pop_back();
      of_carries[begin_ + k] = ways_[k].handed_on ? sum_of(of_later, own) : own;
    }
  }

 private:
  struct way {
    std::string name;
    bool flows = false;      // gradients may pass from slice to slice
    bool entered = false;    // this slice computes a gradient for the previous slice
    bool left = false;       // the next slice computes a gradient for this slice
    bool handed_on = false;  // in half precision, and the forward returned the tensor that it received
    at::ScalarType arrived = at::ScalarType::Undefined, dtype = at::ScalarType::Undefined;  // before and after the forward
    at::Tensor came = {};                                                                   // the forward's input, until `note`

    bool ends() const { return left && !handed_on; }  // is an output of the graph
  };

  /// The sum of two gradients in single precision; an undefined gradient counts as zero.
  static at::Tensor sum_of(at::Tensor const& a, at::Tensor const& b) {
    if (!a.defined() || !b.defined()) return a.defined() ? a : b;
    return a.to(at::kFloat) + b;
  }
  static at::Tensor rounded(at::Tensor const& gradient, at::ScalarType dtype) {
    return gradient.defined() ? gradient.to(dtype) : gradient;
  }

  static std::string words_of(at::ScalarType dtype) {
    return dtype == at::ScalarType::Undefined ? "undefined" : c10::toString(dtype);
  }
  std::size_t end() const { return begin_ + ways_.size(); }

  std::size_t begin_ = 0;  // index of the section's first carry among the stage's
  std::vector<way> ways_;  // of the section's carries
  kept_inputs kept_;       // if the section recomputes
};

/// The carries of a stage for one microbatch's slice, or in a backward their gradients.
class stage_carries final : public companion {
 public:
  void begin_forward(stage_call const& task, tensors&) override {
    lowest_ = task.differentiable ? 0 : task.owner->lowest_trained_part();
    begin(task, task.carried);
  }
  void end_forward(stage_call const& task, tensors&) override { end(task); }
  void begin_backward(stage_call const& task, tensors&) override { begin(task, task.carried); }
  void end_backward(stage_call const& task, tensors&) override { end(task); }

  void arrive(stage_call const& task, section_parts const& of) override {
    if (sections_.size() <= of.number) sections_.resize(of.number + 1);
    sections_[of.number].lay_out(*task.owner, of.first, of.last, lowest_, task.training && !task.untrained);
    sections_[of.number].arrive(carries_);
  }
  void keep(section_parts const& of) override { sections_[of.number].keep(carries_); }
  void check_kept(section_parts const& of, char const* change) const override { sections_[of.number].check_kept(change); }
  /// Puts the stored carries in the place of gradients, until `end_again`.
  void begin_again(section_parts const& of) override {
    under_way_ = std::exchange(carries_, tensors(carries_.size()));
    sections_[of.number].take_kept(carries_);
  }
  void enter(section_parts const& of, stage_graph& graph) override { sections_[of.number].enter(graph, carries_); }
  void before(section_parts const& of, forward_context& around) override {
    around.carried = &carries_;
    sections_[of.number].remember(carries_);
  }
  void after(stage_call const&, section_parts const& of, std::span<collected_losses::given const>) override {
    sections_[of.number].note(carries_);
  }
  void leave(stage_call const&, section_parts const& of, stage_graph& graph) const override {
    sections_[of.number].leave(graph, carries_);
  }
  /// Drops the carries of the second forward, as F has passed on its own.
  void end_again(section_parts const&) override { carries_ = std::move(under_way_); }

  bool gives_gradients(section_parts const& of) const override { return sections_[of.number].gives_gradients(); }
  void append_gradients(stage_call const&, section_parts const& of, tensors& output_gradients) const override {
    sections_[of.number].append_gradients(carries_, output_gradients);
  }
  void take_gradients(section_parts const& of, tensors& input_gradients) override {
    sections_[of.number].take_gradients(input_gradients, carries_);
  }

 private:
  /// \param given carries of the neighbouring slice, or their gradients; null or empty: undefined tensors
  void begin(stage_call const& task, tensors const* given) {
    carries_.assign(task.owner->carries_before(task.owner->parts()), at::Tensor());
    if (given != nullptr && !given->empty()) carries_ = *given;
  }
  /// Writes the carries to `task.carried`, for the neighbouring slice.
  void end(stage_call const& task) {
    if (task.carried != nullptr) {
      task.carried->clear();
      for (at::Tensor const& t : carries_) task.carried->push_back(detail::apart(*task.owner, t));
    }
    carries_.clear();
  }

  tensors carries_;  // carries, or gradients of carries, of the current computation, in the order of declaration
  tensors under_way_;
  std::vector<section_carries> sections_;
  std::size_t lowest_ = 0;  // the stage's lowest trained part
};

}  // namespace chevron::detail
