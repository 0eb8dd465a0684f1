#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// One step's batch, cut into microbatches.

namespace chevron {

/// Which samples of a batch a microbatch holds.
struct sample_range {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Parts that differ by at most one sample, the larger ones first: 10 samples in 4 parts are 3, 3, 2, 2.
/// \param micro_batch which of the parts, from 0
constexpr sample_range samples_of(std::int64_t samples, int micro_batches, int micro_batch) {
  std::int64_t const small = samples / micro_batches;
  std::int64_t const larger = samples % micro_batches;
  std::int64_t const before = micro_batch < larger ? micro_batch : larger;
  return {micro_batch * small + before, small + (micro_batch < larger ? 1 : 0)};
}

/// One step's data, of one replica: the same on all ranks of its pipeline. Dimension 0 of inputs, of targets and of side inputs
/// that are not `whole` is samples, equally many in each. No tensor may need a gradient.
struct batch {
  tensors inputs;                            ///< of stage 0
  tensors targets;                           ///< of the loss
  std::vector<side_input> side_inputs = {};  ///< for stages that ask for them by name (`stage::side_inputs`)
};

/// A view of the same memory with a version counter of its own, so that a change in place of one microbatch does not
/// invalidate the graphs of the others.
inline at::Tensor counted_alone(at::Tensor const& t) { return t.defined() ? t.variable_data() : t; }

/// No gradient leaves the pipeline for what it was given: whatever computed a batch would not be trained.
/// \throws usage_error for a tensor that needs a gradient
inline void check_detached(batch const& given) {
  auto const look = [](at::Tensor const& t, std::string const& name) {
    if (!t.defined() || !t.requires_grad()) return;
    throw usage_error(name +
                      " needs a gradient, which does not leave the pipeline: what it was computed with would not be trained. "
                      "Remedy: compute it in stage 0 or in the loss, or detach() it");
  };
  for (std::size_t i = 0; i < given.inputs.size(); ++i) look(given.inputs[i], "input " + std::to_string(i));
  for (std::size_t i = 0; i < given.targets.size(); ++i) look(given.targets[i], "target " + std::to_string(i));
  for (side_input const& e : given.side_inputs) look(e.value, "side input `" + e.name + "`");
}

/// What a microbatch counts in the loss and its gradients: its tokens, say. The loss function gives the mean over these. A finite
/// number from 0; a microbatch of 0 is left out.
using loss_weight_function = std::function<double(batch const& micro_batch)>;

/// There is no mean over nothing.
[[noreturn]] inline void refuse_empty_mean(error_context const& here = {}) {
  throw usage_error("the microbatches of this step count nothing: there is no mean loss", here);
}

/// A batch (of one replica) in M parts: cut along dimension 0 (views, nothing is copied), or as the user cut it.
///
/// Each microbatch weighs its share of all microbatches of *all* replicas. The mean loss of a microbatch times its weight, added
/// up, is the mean loss over all samples (or tokens), and gradients of it need no scaling afterwards, whatever the sizes.
class split_batch {
 public:
  /// Cuts a batch; each part counts as many as it has samples.
  /// \throws usage_error when the tensors disagree about the number of samples, or there are fewer samples than microbatches
  void split(batch const& whole, int count) {
    samples_ = samples_in(whole);
    if (samples_ < count) {
      throw usage_error("a batch of " + std::to_string(samples_) + " samples cannot be cut into " + std::to_string(count) +
                        " microbatches: give at least one sample per microbatch, or fewer microbatches");
    }
    parts_.resize(static_cast<std::size_t>(count));
    for (int m = 0; m < count; ++m) {
      sample_range const range = samples_of(samples_, count, m);
      part& p = parts_[static_cast<std::size_t>(m)];
      cut(whole.inputs, range, p.data.inputs);
      cut(whole.targets, range, p.data.targets);
      p.data.side_inputs.clear();
      for (side_input const& e : whole.side_inputs) {
        p.data.side_inputs.push_back(
            {e.name, counted_alone(e.whole ? e.value : e.value.narrow(0, range.first, range.count)), true});
      }
      p.counts = static_cast<double>(range.count);
    }
  }

  /// Takes microbatches as they are; each counts as many as it has samples.
  /// \throws usage_error when there are not `count` of them, or the tensors of one disagree about the number of samples
  void take(std::span<batch const> micro_batches, int count) {
    if (micro_batches.size() != static_cast<std::size_t>(count)) {
      throw usage_error("the program runs " + std::to_string(count) + " microbatches a step, " +
                        std::to_string(micro_batches.size()) + " were given");
    }
    samples_ = 0;
    parts_.resize(static_cast<std::size_t>(count));
    for (std::size_t m = 0; m < parts_.size(); ++m) {
      std::int64_t samples = 0;
      try {
        samples = samples_in(micro_batches[m]);
      } catch (usage_error const& e) {
        throw usage_error("microbatch " + std::to_string(m) + ": " + e.what());
      }
      samples_ += samples;
      parts_[m].data = micro_batches[m];
      for (at::Tensor& t : parts_[m].data.inputs) t = counted_alone(t);
      for (side_input& e : parts_[m].data.side_inputs) e.value = counted_alone(e.value);
      parts_[m].counts = static_cast<double>(samples);
    }
  }

  /// Lets `loss_weight` say what each microbatch counts, instead of its samples.
  /// \throws usage_error for what is no weight
  void weigh(loss_weight_function const& weigh) {
    for (std::size_t m = 0; m < parts_.size(); ++m) {
      parts_[m].counts = weigh(parts_[m].data);
      if (!std::isfinite(parts_[m].counts) || parts_[m].counts < 0) {
        throw usage_error("microbatch " + std::to_string(m) + " was weighed as " + std::to_string(parts_[m].counts) +
                          ": a weight is a number from 0");
      }
    }
  }

  /// What all microbatches together count.
  double counts() const {
    double sum = 0;
    for (part const& p : parts_) sum += p.counts;
    return sum;
  }

  /// Sets each microbatch's weight to its share.
  /// \param global_weight what all microbatches of this step count, over all replicas
  void share(double global_weight) {
    for (part& p : parts_) p.weight = p.counts / global_weight;
  }

  /// How many samples these tensors hold, the same in each.
  /// \throws usage_error where they disagree, or have no dimension 0
  static std::int64_t samples_in(batch const& whole) {
    if (whole.inputs.empty() && whole.targets.empty()) throw usage_error("a step needs at least one input or target tensor");
    std::int64_t samples = -1;
    std::string first;
    auto const look = [&](at::Tensor const& t, std::string const& name) {
      if (!t.defined() || t.dim() == 0) throw usage_error(name + " has no dimension of samples (dimension 0)");
      if (samples < 0) {
        samples = t.size(0);
        first = name;
      } else if (t.size(0) != samples) {
        throw usage_error(name + " has " + std::to_string(t.size(0)) + " samples (dimension 0) but " + first + " has " +
                          std::to_string(samples));
      }
    };
    for (std::size_t i = 0; i < whole.inputs.size(); ++i) look(whole.inputs[i], "input " + std::to_string(i));
    for (std::size_t i = 0; i < whole.targets.size(); ++i) look(whole.targets[i], "target " + std::to_string(i));
    for (side_input const& e : whole.side_inputs) {
      if (!e.whole) look(e.value, "side input `" + e.name + "`");
    }
    return samples;
  }

  int count() const { return static_cast<int>(parts_.size()); }
  std::int64_t samples() const { return samples_; }
  tensors const& inputs(int m) const { return of(m).data.inputs; }
  tensors const& targets(int m) const { return of(m).data.targets; }
  std::span<side_input const> side_inputs(int m) const { return of(m).data.side_inputs; }
  double counts(int m) const { return of(m).counts; }
  double weight(int m) const { return of(m).weight; }
  /// Its loss, whatever it is (of no tokens the mean is not a number), and its gradients are no part of the step's.
  bool counts_nothing(int m) const { return of(m).counts == 0; }
  bool any_counts_nothing() const {
    return std::any_of(parts_.begin(), parts_.end(), [](part const& p) { return p.counts == 0; });
  }
  /// Whether a stage has changed a microbatch's inputs, or what it took by name, in place.
  bool was_changed(int m) const {
    auto const changed = [](at::Tensor const& t) { return t.defined() && t._version() != 0; };
    batch const& b = of(m).data;
    return std::any_of(b.inputs.begin(), b.inputs.end(), changed) ||
           std::any_of(b.side_inputs.begin(), b.side_inputs.end(), [&](side_input const& e) { return changed(e.value); });
  }
  /// What the backward of a microbatch's loss begins with: its weight, scaled.
  double gradient_weight(int m) const { return of(m).weight * scale_; }
  void scale_gradients(double factor) { scale_ = factor; }

  /// Microbatches are numbered over the whole optimizer step, which may accumulate several batches; these begin here.
  void number_from(int first) { first_ = first; }
  int number(int m) const { return first_ + m; }

  /// Dtypes and sizes of everything: where these are the same, so are those of the messages between stages.
  void append_shapes(std::vector<std::int64_t>& out) const {
    auto const add = [&](at::Tensor const& t) {
      out.push_back(t.defined() ? static_cast<std::int64_t>(t.scalar_type()) : -1);
      if (!t.defined()) return;
      out.push_back(t.dim());
      out.insert(out.end(), t.sizes().begin(), t.sizes().end());
    };
    for (part const& p : parts_) {
      for (at::Tensor const& t : p.data.inputs) add(t);
      for (at::Tensor const& t : p.data.targets) add(t);
      for (side_input const& e : p.data.side_inputs) add(e.value);
    }
  }

 private:
  struct part {
    batch data;
    double counts = 0;
    double weight = 0;
  };

  part const& of(int m) const { return parts_[static_cast<std::size_t>(m)]; }

  static void cut(std::span<at::Tensor const> all, sample_range range, tensors& out) {
    out.clear();
    for (at::Tensor const& t : all) out.push_back(counted_alone(t.narrow(0, range.first, range.count)));
  }

  std::vector<part> parts_;
  std::int64_t samples_ = 0;
  int first_ = 0;
  double scale_ = 1;
};

}  // namespace chevron
